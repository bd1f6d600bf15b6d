/*
 * cpuid.c: which instruction sets this CPU has and this operating system saves.
 *
 * CPUID alone is not enough: a kernel or hypervisor that does not save the wide registers clears their bits in XCR0,
 * which XGETBV reads, and using them then faults. AMX's 8 KB a thread Linux saves only for a process that asked for
 * them, which is done once.
 */
#include "internal.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQ_XCOMP_PERM 0x1023 /* of arch_prctl: asm/prctl.h is not everywhere */
#define XTILEDATA 18
#define CPUID_AMX ((1u << 24) | (1u << 22)) /* tiles, and bf16 in them; compilers' names for these differ */

enum { NOT_ASKED, ALLOWED, UNKNOWN_TO_KERNEL, SIGNAL_STACK, REFUSED };

static _Atomic int amx_state; /* of the above */

/* May this process use tiles? Asks the first time; two threads that both do get the same answer. */
static int ask_for_tiles(void)
{
  int state = atomic_load(&amx_state);
  if (state != NOT_ASKED)
    return state;
  const int before = errno;
  if (syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0)
    state = ALLOWED;
  else
    state = errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP ? UNKNOWN_TO_KERNEL
            : errno == ENOSPC                                         ? SIGNAL_STACK
                                                                      : REFUSED;
  errno = before;
  atomic_store(&amx_state, state);
  return state;
}

static uint64_t read_xcr0(void)
{
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

#ifdef ESMM_AMX_EMULATED
enum { EMULATED = 1 }; /* tests: amx.h does what the unit does */
#else
enum { EMULATED = 0 };
#endif

/* edx: of CPUID's leaf 7 */
static bool has_tiles(unsigned edx, uint64_t xcr0)
{
  return EMULATED || ((edx & CPUID_AMX) == CPUID_AMX && (xcr0 & 0x60000) == 0x60000 && ask_for_tiles() == ALLOWED);
}

unsigned esmm_cpu_detect(void)
{
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d))
    return 0;
  const unsigned need1 = bit_FMA | bit_POPCNT | bit_OSXSAVE | bit_AVX | bit_F16C;
  if ((c & need1) != need1)
    return 0;
  const uint64_t xcr0 = read_xcr0();
  if ((xcr0 & 0x6) != 0x6) /* XMM and YMM state */
    return 0;
  unsigned a7, b7, c7, d7, ax, bx, cx, dx;
  if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) || !__get_cpuid(0x80000001, &ax, &bx, &cx, &dx))
    return 0;
  const unsigned need7 = bit_AVX2 | bit_BMI | bit_BMI2;
  if ((b7 & need7) != need7 || !(cx & bit_LZCNT))
    return 0;
  unsigned found = ESMM_CPU_AVX2;
  const unsigned need512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL | bit_AVX512CD;
  if ((b7 & need512) == need512 && (xcr0 & 0xe0) == 0xe0) /* mask registers, ZMM0-15 high halves, ZMM16-31 */
    found |= ESMM_CPU_AVX512;
  unsigned a71, b71, c71, d71;
  if (found & ESMM_CPU_AVX512 && a7 >= 1 && __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71) && a71 & bit_AVX512BF16)
    found |= ESMM_CPU_AVX512BF16;
  if (found & ESMM_CPU_AVX512BF16 && c7 & bit_AVX512VBMI2 && has_tiles(d7, xcr0))
    found |= ESMM_CPU_AMX;
  return found;
}

const char *esmm_cpu_amx_refused(void)
{
  switch (atomic_load(&amx_state)) {
  case UNKNOWN_TO_KERNEL:
    return "this kernel gives no permission for AMX tiles (Linux 5.16 and later do)";
  case SIGNAL_STACK:
    return "AMX tiles do not fit on an alternate signal stack of this process: make it larger";
  case REFUSED:
    return "this process got no permission for AMX tiles (arch_prctl)";
  default:
    return NULL;
  }
}

void esmm_cpu_name(char *out, size_t bytes)
{
  unsigned words[12] = {0};
  unsigned a, b, c, d;
  if (__get_cpuid(0x80000000, &a, &b, &c, &d) && a >= 0x80000004) {
    for (unsigned i = 0; i < 3; i++)
      __get_cpuid(0x80000002 + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
  }
  char text[49] = {0};
  memcpy(text, words, 48);
  const char *start = text + strspn(text, " ");
  size_t length = strlen(start);
  while (length && start[length - 1] == ' ')
    length--;
  (void)snprintf(out, bytes, "%.*s", (int)length, length ? start : "");
  if (!length)
    (void)snprintf(out, bytes, "x86_64 CPU");
}

#else

unsigned esmm_cpu_detect(void)
{
  return 0;
}

const char *esmm_cpu_amx_refused(void)
{
  return NULL;
}

void esmm_cpu_name(char *out, size_t bytes)
{
  FILE *f = fopen("/proc/cpuinfo", "r");
  char line[256];
  (void)snprintf(out, bytes, "CPU");
  while (f && fgets(line, sizeof line, f)) {
    char *colon = strchr(line, ':');
    if (colon && strncmp(line, "model name", 10) == 0) {
      (void)snprintf(out, bytes, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
      break;
    }
  }
  if (f)
    (void)fclose(f);
}
#endif
