// Marks what host and GPU compile alike.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif
