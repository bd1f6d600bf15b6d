/* measured.c: the table of measured.h. A class lies in one of a few places that its hash gives. */
#include "choose/measured.h"

#include "internal.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define PLACES 16        /* a class may lie in */
#define HOMES 64         /* files of one process */
#define MOST_RATIO 500.0 /* and at least its inverse */
#define SCALE 1e6        /* a file has whole millionths: decimal points follow the locale */
#define KEPT_TIMES 3     /* of a kernel in a file count */
#define DOUBTFUL 3.0
#define FREE (-1) /* no kernel */
#define LINE_BYTES 512
#define WEIGHT 0.125 /* of a new time among those of all classes */

typedef struct slot {
  _Atomic int16_t kernel; /* and 1 more: 0 is free */
  _Atomic uint16_t added; /* times so far; */
  _Atomic uint16_t cold;  /* of them, ignored: the first warm one was below; */
  _Atomic bool warm;      /* there was one */
  _Atomic bool dropped;   /* the first was, and another would count */
  _Atomic float low;      /* their lower quartile */
  _Atomic float times[ESMM_MEASURED_TIMES];
} slot;

typedef struct entry {
  _Atomic esmm_class of;
  _Atomic uint32_t used; /* when, by the table's clock */
  _Atomic uint32_t home;
  slot slots[ESMM_MEASURED_KERNELS];
} entry;

static struct {
  _Atomic pid_t busy; /* the process with a thread that writes; 0: none */
  _Atomic uint32_t clock;
  _Atomic float anywhere[ESMM_MAX_KERNELS]; /* logarithms; 0 where nothing was measured */
  struct {
    _Atomic uint32_t home, news;
  } homes[HOMES];
  entry entries[ESMM_MEASURED_CLASSES];
} table;

#define GET(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define SET(x, value) atomic_store_explicit(&(x), value, memory_order_relaxed)

/* ---- reading ---- */

static entry *find(esmm_class of)
{
  for (uint64_t i = 0; of && i < PLACES; i++) {
    entry *e = &table.entries[(of + i) % ESMM_MEASURED_CLASSES];
    if (GET(e->of) == of)
      return e;
  }
  return NULL;
}

static slot *slot_of(entry *e, int kernel)
{
  for (int i = 0; e && i < ESMM_MEASURED_KERNELS; i++)
    if (GET(e->slots[i].kernel) == kernel + 1)
      return &e->slots[i];
  return NULL;
}

/* How many count. */
static int times_of(const slot *s)
{
  const int added = GET(s->added), counted = added - GET(s->cold); /* another thread may be changing both */
  return counted < 0 ? 0 : counted < ESMM_MEASURED_TIMES ? counted : ESMM_MEASURED_TIMES;
}

double esmm_measured(esmm_class of, int kernel, esmm_evidence *seen)
{
  const slot *s = slot_of(find(of), kernel);
  *seen = (esmm_evidence){.times = s ? times_of(s) : 0};
  seen->warm = seen->times > 0 && GET(s->warm);
  return seen->times > 0 ? (double)GET(s->low) : 0.0;
}

uint32_t esmm_measured_count(esmm_class of, int kernel)
{
  const slot *s = slot_of(find(of), kernel);
  return s ? GET(s->added) : 0;
}

double esmm_measured_anywhere(int kernel)
{
  return exp((double)GET(table.anywhere[kernel]));
}

/* ---- writing: one thread at a time, and never a wait ---- */

/* A child forked while another thread wrote takes the table as it is: it holds only times. */
static bool enter(void)
{
  const pid_t mine = getpid();
  pid_t there = 0;
  return atomic_compare_exchange_strong_explicit(&table.busy, &there, mine, memory_order_acquire,
                                                 memory_order_relaxed) ||
         (there != mine && atomic_compare_exchange_strong_explicit(&table.busy, &there, mine, memory_order_acquire,
                                                                   memory_order_relaxed));
}

static void enter_waiting(void)
{
  while (!enter())
    (void)sched_yield(); /* an addition takes a microsecond */
}

static void leave(void)
{
  atomic_store_explicit(&table.busy, 0, memory_order_release);
}

static uint32_t tick(void)
{
  return atomic_fetch_add_explicit(&table.clock, 1, memory_order_relaxed);
}

static void clear_slot(slot *s, int kernel)
{
  SET(s->kernel, (int16_t)(kernel + 1));
  SET(s->added, 0);
  SET(s->cold, 0);
  SET(s->warm, false);
  SET(s->dropped, false);
}

static void clear(entry *e, esmm_class of)
{
  SET(e->of, 0);
  for (int i = 0; i < ESMM_MEASURED_KERNELS; i++)
    clear_slot(&e->slots[i], FREE);
  SET(e->of, of);
}

/* The class's place, or a free one; NULL: there is none. */
static entry *room_for(esmm_class of)
{
  entry *found = find(of);
  for (uint64_t i = 0; !found && i < PLACES; i++) {
    entry *e = &table.entries[(of + i) % ESMM_MEASURED_CLASSES];
    if (GET(e->of) == 0)
      found = e;
  }
  return found;
}

/* The class, in place of the one that was not used for longest. */
static entry *make(esmm_class of, uint32_t home)
{
  entry *oldest = room_for(of);
  if (!oldest) {
    const uint32_t now = GET(table.clock);
    oldest = &table.entries[of % ESMM_MEASURED_CLASSES];
    for (uint64_t i = 1; i < PLACES; i++) {
      entry *e = &table.entries[(of + i) % ESMM_MEASURED_CLASSES];
      if (now - GET(e->used) > now - GET(oldest->used))
        oldest = e;
    }
  }
  if (GET(oldest->of) != of)
    clear(oldest, of);
  SET(oldest->used, tick());
  SET(oldest->home, home);
  return oldest;
}

/* The kernel's slot, a free one, or in place of the one with the fewest times. */
static slot *make_slot(entry *e, int kernel)
{
  slot *s = slot_of(e, kernel);
  if (s)
    return s;
  s = slot_of(e, FREE);
  for (int i = 0; i < ESMM_MEASURED_KERNELS && GET(e->slots[i].kernel) != 0; i++)
    if (!s || GET(e->slots[i].added) < GET(s->added))
      s = &e->slots[i];
  clear_slot(s, kernel);
  return s;
}

static int by_value(const void *x, const void *y)
{
  const float a = *(const float *)x, b = *(const float *)y;
  return (a > b) - (a < b);
}

static void add_time(slot *s, bool warm, float ratio)
{
  float times[ESMM_MEASURED_TIMES];
  const uint16_t added = GET(s->added);
  if (warm && !GET(s->warm) && (added == 0 || ratio < GET(s->low)))
    SET(s->cold, added);
  if (warm)
    SET(s->warm, true);
  SET(s->times[added % ESMM_MEASURED_TIMES], ratio);
  const int counted = added + 1 - GET(s->cold), count = counted < ESMM_MEASURED_TIMES ? counted : ESMM_MEASURED_TIMES;
  for (int i = 0; i < count; i++)
    times[i] = GET(s->times[(added - i) % ESMM_MEASURED_TIMES]);
  qsort(times, (size_t)count, sizeof *times, by_value);
  SET(s->low, times[(count - 1) / 4]);
  /* The number of times says where the next one goes, too: it must not pass over any. */
  if (added == UINT16_MAX)
    SET(s->cold, 0); /* all that are looked at are newer */
  SET(s->added, (uint16_t)(added < UINT16_MAX ? added + 1 : UINT16_MAX - ESMM_MEASURED_TIMES + 1));
}

static void note_news(uint32_t home)
{
  for (int i = 0; home && i < HOMES; i++) {
    if (GET(table.homes[i].home) == 0)
      SET(table.homes[i].home, home);
    if (GET(table.homes[i].home) == home) {
      SET(table.homes[i].news, GET(table.homes[i].news) + 1);
      return;
    }
  }
}

static bool is_ratio(double ratio)
{
  return ratio >= 1.0 / MOST_RATIO && ratio <= MOST_RATIO;
}

/* A first time far above what the class, or other classes, suggest: it was disturbed, or slow for once. A second one
   counts. */
static bool doubtful(entry *e, slot *s, int kernel, double ratio)
{
  if (GET(s->added) > 0 || GET(s->dropped))
    return false;
  double least = 0.0;
  for (int i = 0; i < ESMM_MEASURED_KERNELS; i++)
    if (GET(e->slots[i].added) > 0 && (least == 0.0 || (double)GET(e->slots[i].low) < least))
      least = (double)GET(e->slots[i].low);
  if (ratio <= DOUBTFUL * (least > 0.0 ? least : esmm_measured_anywhere(kernel)))
    return false;
  SET(s->dropped, true);
  return true;
}

void esmm_measured_add(esmm_class of, uint32_t home, int kernel, bool warm, double ratio)
{
  if (of == 0 || !is_ratio(ratio) || !enter())
    return;
  entry *e = make(of, home);
  slot *s = make_slot(e, kernel);
  if (!doubtful(e, s, kernel, ratio)) {
    add_time(s, warm, (float)ratio);
    const float before = GET(table.anywhere[kernel]), now = (float)log(ratio);
    SET(table.anywhere[kernel], before == 0.0f ? now : before + (float)WEIGHT * (now - before));
    note_news(home);
  }
  leave();
}

void esmm_measured_clear(void)
{
  for (int i = 0; i < ESMM_MEASURED_CLASSES; i++)
    clear(&table.entries[i], 0);
  for (int i = 0; i < ESMM_MAX_KERNELS; i++)
    SET(table.anywhere[i], 0.0f);
  for (int i = 0; i < HOMES; i++)
    SET(table.homes[i].news, 0);
}

/* ---- text: a class in hexadecimal, and for each kernel its name, how many times and their lower quartile ---- */

uint32_t esmm_measured_news(uint32_t home)
{
  for (int i = 0; home && i < HOMES; i++)
    if (GET(table.homes[i].home) == home)
      return GET(table.homes[i].news);
  return 0;
}

void esmm_measured_written(uint32_t home)
{
  for (int i = 0; home && i < HOMES; i++)
    if (GET(table.homes[i].home) == home)
      SET(table.homes[i].news, 0);
}

bool esmm_measured_print(FILE *f, uint32_t home, long most, const char *(*name)(int kernel))
{
  bool ok = true;
  for (int i = 0; i < ESMM_MEASURED_CLASSES && ok && ftell(f) < most - LINE_BYTES; i++) {
    entry *e = &table.entries[i];
    const esmm_class of = GET(e->of);
    if (of == 0 || GET(e->home) != home)
      continue;
    ok = fprintf(f, "%016llx", (unsigned long long)of) > 0;
    for (int j = 0; j < ESMM_MEASURED_KERNELS && ok; j++) {
      const slot *s = &e->slots[j];
      const int kernel = GET(s->kernel), times = GET(s->added);
      const long low = lround((double)GET(s->low) * SCALE);
      if (kernel && times && low > 0) /* another thread may be adding the first */
        ok = fprintf(f, " %s %d %ld", name(kernel - 1), times, low) > 0;
    }
    ok = ok && fprintf(f, "\n") > 0;
  }
  return ok;
}

bool esmm_measured_parse(const char *line, uint32_t home, int (*kernel_of)(const char *name))
{
  struct {
    int kernel, times;
    double ratio;
  } all[ESMM_MEASURED_KERNELS];
  int count = 0, used = 0;
  unsigned long long of;
  if (sscanf(line, "%16llx%n", &of, &used) != 1 || used != 16 || of == 0)
    return false;
  for (line += used; *line && *line != '\n'; line += used) {
    char name[64];
    int times;
    long ratio;
    if (count == ESMM_MEASURED_KERNELS || sscanf(line, " %63s %9d %9ld%n", name, &times, &ratio, &used) != 3 ||
        times < 1 || !is_ratio((double)ratio / SCALE))
      return false;
    all[count].kernel = kernel_of(name);
    all[count].times = times;
    all[count].ratio = (double)ratio / SCALE;
    count += all[count].kernel >= 0;
  }
  if (*line != '\n')
    return false;
  enter_waiting();
  entry *e = !find(of) && room_for(of) ? make(of, home) : NULL;
  for (int i = 0; i < count && e; i++)
    for (int j = 0; j < (all[i].times < KEPT_TIMES ? all[i].times : KEPT_TIMES); j++)
      add_time(make_slot(e, all[i].kernel), all[i].times > KEPT_TIMES, (float)all[i].ratio);
  leave();
  return true;
}
