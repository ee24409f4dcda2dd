// Stands in for CuTe's integer sequences (cuda::std's): explode() of cute/arch/util.hpp takes one.
#pragma once

#include <cute/config.hpp>

namespace cute {

template <class T, T... Values>
struct integer_sequence {};
template <int... Values>
using int_sequence = integer_sequence<int, Values...>;

}  // namespace cute
