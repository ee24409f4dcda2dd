// The matmul of this object: AMX tiles or float vectors.
#pragma once

#if defined(TESSERA_CPU_AMX)
#include "cpu/amx-inl.h"
#else
#include "cpu/matmul-inl.h"
#endif
