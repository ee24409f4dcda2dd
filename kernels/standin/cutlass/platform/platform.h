// Stands in for CUTLASS's copy of the C++ library, which cutlass/arch/config.h includes and does not use.
#pragma once
