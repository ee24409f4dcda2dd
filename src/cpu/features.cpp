#include "cpu/features.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace tessera::cpu {

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool has(unsigned word, unsigned bit) { return (word >> bit & 1u) != 0; }

// What the operating system saves on a context switch.
std::uint64_t saved_state() {
  if (!has(cpuid(1, 0).ecx, 27)) return 0;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

struct Features {
  bool ssse3, avx2, avx512, avx512_bf16, amx;
  Prefetches prefetches;

  Features() {
    constexpr std::uint64_t avx_state = 0x6, avx512_state = 0xE6, amx_state = 0x60000;
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    const std::uint64_t state = saved_state();
    const bool amd = cpuid(0, 0).ecx == 0x444D4163;  // "cAMD", the end of AuthenticAMD
    // Where the family's four bits are all set, eight more add to them: Zen 4 is 0x19, Zen 5 0x1A.
    const unsigned family = (basic.eax >> 8 & 0xF) + (basic.eax >> 20 & 0xFF);
    prefetches = !amd ? Prefetches::ask_once : family >= 0x1A ? Prefetches::ask_often : Prefetches::ask_again;
    ssse3 = has(basic.ecx, 9);
    const bool fma = has(basic.ecx, 12), f16c = has(basic.ecx, 29),
               sse4 = has(basic.ecx, 19) && has(basic.ecx, 20);
    const bool aes = has(basic.ecx, 25) && has(basic.ecx, 1),
               bmi = has(extended.ebx, 3) && has(extended.ebx, 8);
    avx2 = has(extended.ebx, 5) && fma && f16c && sse4 && aes && bmi && (state & avx_state) == avx_state;
    const bool f = has(extended.ebx, 16), dq = has(extended.ebx, 17), cd = has(extended.ebx, 28),
               bw = has(extended.ebx, 30), vl = has(extended.ebx, 31);
    avx512 = avx2 && f && dq && cd && bw && vl && (state & avx512_state) == avx512_state;
    avx512_bf16 = avx512 && has(more.eax, 5);
    const bool amx_tile = has(extended.edx, 24), amx_bf16 = has(extended.edx, 22);
    amx = avx512_bf16 && amx_tile && amx_bf16 && (state & amx_state) == amx_state;
  }
};

const Features& features() {
  static const Features instance;
  return instance;
}

// Linux gives a process its tile registers only when asked.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  static const bool permitted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return permitted;
#else
  return false;
#endif
}

}  // namespace

std::string missing_for_amx() {
  if (!features().amx) return "this CPU has no AMX with bfloat16";
  return tiles_permitted() ? "" : "the operating system does not permit AMX tiles";
}
std::string missing_for_avx512_bf16() {
  return features().avx512_bf16 ? "" : "this CPU has no AVX-512 with bfloat16";
}
std::string missing_for_avx512() {
  return features().avx512 ? "" : "this CPU has no AVX-512 (F, DQ, CD, BW, VL)";
}
std::string missing_for_avx2() { return features().avx2 ? "" : "this CPU has no AVX2 with FMA and F16C"; }
std::string missing_for_baseline() { return features().ssse3 ? "" : "this CPU has no SSSE3"; }
#else
std::string missing_for_baseline() { return ""; }
#endif

namespace {

std::atomic<Prefetches>& current_prefetches() {
#if defined(__x86_64__)
  static std::atomic<Prefetches> instance = features().prefetches;
#else
  static std::atomic<Prefetches> instance = Prefetches::ask_once;
#endif
  return instance;
}

}  // namespace

Prefetches prefetches() { return current_prefetches().load(std::memory_order_relaxed); }
Prefetches set_prefetches(Prefetches value) { return current_prefetches().exchange(value); }

}  // namespace tessera::cpu
