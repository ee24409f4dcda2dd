// Stands in for Blackwell's TMA, which cutlass/arch/barrier.h includes and Hopper has no use for.
#pragma once
