/* recall.c: the tables of recall.h, and the public functions that show and set what is remembered. */
#include "choose/recall.h"
#include "backend.h"

#include <stdatomic.h>
#include <string.h>

#define BUCKETS (2 * ESMM_RECALL_ENTRIES)
#define MOST_ROW_CLASS 7
#define NONE (-1)
#define ROUNDED 1e-6 /* densities that were measured are fp32 */

/* All that can_run() and terms() of a kernel may look at, but for A's values. Zeroed before it is filled in, so that it
   can be compared as bytes. */
typedef struct key {
  uint64_t serial;
  int64_t m, a_ld, c_ld;
  int32_t threads;
  uint8_t a_dtype, a_order, a_place, a_align;
  uint8_t c_dtype, c_order, c_place, c_align;
  uint8_t adds, bias, activation, gated;
  uint8_t residual, residual_dtype, residual_order, nonzeros;
  uint8_t bitmaps, strict, pattern, scales;
} key;
_Static_assert(sizeof(key) == 56, "whole words, for the hash");

/* Entries of a table by hash, and by when they were used. */
typedef struct directory {
  int16_t bucket[BUCKETS]; /* its first entry */
  int16_t next[ESMM_RECALL_ENTRIES], older[ESMM_RECALL_ENTRIES], newer[ESMM_RECALL_ENTRIES];
  uint64_t hash[ESMM_RECALL_ENTRIES];
  int16_t newest, oldest, used;
} directory;

typedef struct recalled {
  key key;
  _Alignas(8) unsigned char kept[ESMM_SHAPE_BYTES];
} recalled;

struct esmm_recall_tables {
  directory of_shapes, of_seen;
  int64_t shapes_made;
  recalled shapes[ESMM_RECALL_ENTRIES];
  esmm_seen seen[ESMM_RECALL_ENTRIES];
};

/* ---- entries in their order ---- */

static void directory_clear(directory *x)
{
  memset(x->bucket, 0xff, sizeof x->bucket);
  x->newest = x->oldest = NONE;
  x->used = 0;
}

static void unlink_age(directory *x, int16_t i)
{
  *(x->newer[i] == NONE ? &x->newest : &x->older[x->newer[i]]) = x->older[i];
  *(x->older[i] == NONE ? &x->oldest : &x->newer[x->older[i]]) = x->newer[i];
}

static void link_newest(directory *x, int16_t i)
{
  x->older[i] = x->newest;
  x->newer[i] = NONE;
  *(x->newest == NONE ? &x->oldest : &x->newer[x->newest]) = i;
  x->newest = i;
}

static void directory_touch(directory *x, int16_t i)
{
  if (x->newest == i)
    return;
  unlink_age(x, i);
  link_newest(x, i);
}

/* Where the next new entry goes: free, or the oldest, which is still there. */
static int16_t directory_room(const directory *x)
{
  return x->used < ESMM_RECALL_ENTRIES ? x->used : x->oldest;
}

/* Takes that room. */
static void directory_add(directory *x, int16_t i, uint64_t hash)
{
  if (i == x->used) {
    x->used++;
  } else {
    int16_t *at = &x->bucket[x->hash[i] % BUCKETS];
    while (*at != i)
      at = &x->next[*at];
    *at = x->next[i];
    unlink_age(x, i);
  }
  x->hash[i] = hash;
  x->next[i] = x->bucket[hash % BUCKETS];
  x->bucket[hash % BUCKETS] = i;
  link_newest(x, i);
}

static uint64_t mix(uint64_t hash, uint64_t word)
{
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

/* ---- tables ---- */

esmm_status esmm_recall_open(esmm_ctx *ctx)
{
  if (!ctx->remember)
    return ESMM_OK;
  struct esmm_recall_tables *t = esmm_mem_alloc(&ctx->allocator, sizeof *t);
  if (!t)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for what a context remembers, %zu bytes", sizeof *t);
  directory_clear(&t->of_shapes);
  directory_clear(&t->of_seen);
  t->shapes_made = 0;
  ctx->recall = t;
  return ESMM_OK;
}

void esmm_recall_close(esmm_ctx *ctx)
{
  esmm_mem_free(&ctx->allocator, ctx->recall, sizeof *ctx->recall);
  ctx->recall = NULL;
}

uint64_t esmm_weights_serial(void)
{
  static atomic_uint_least64_t last;
  return atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
}

/* ---- shapes of calls ---- */

static uint8_t alignment(const void *data)
{
  return (uint8_t)((uintptr_t)data % 16);
}

static key key_of(const esmm_problem *p)
{
  key k;
  memset(&k, 0, sizeof k);
  k.serial = p->w->serial;
  k.m = p->m;
  k.a_ld = p->a.ld;
  k.c_ld = p->c.ld;
  k.threads = p->threads;
  k.a_dtype = (uint8_t)p->a.dtype;
  k.a_order = (uint8_t)p->a.order;
  k.a_place = (uint8_t)p->a.place;
  k.a_align = alignment(p->a.data);
  k.c_dtype = (uint8_t)p->c.dtype;
  k.c_order = (uint8_t)p->c.order;
  k.c_place = (uint8_t)p->c.place;
  k.c_align = alignment(p->c.data);
  k.adds = p->beta == 0.0f ? 0 : p->beta == 1.0f ? 1 : 2;
  k.scales = p->alpha != 1.0f;
  k.bias = !p->bias ? 0 : (uintptr_t)p->bias % 8 == 0 ? 1 : 2; /* a GPU's kernels read two at once */
  k.activation = (uint8_t)p->activation;
  k.gated = p->gated;
  k.residual = !p->residual.data ? 0 : esmm_in_pairs(&p->residual) ? 1 : 2;
  k.residual_dtype = k.residual ? (uint8_t)p->residual.dtype : 0;
  k.residual_order = k.residual ? (uint8_t)p->residual.order : 0;
  k.nonzeros = p->nonzeros != NULL;
  k.bitmaps = !p->bitmaps ? 0 : p->bitmaps->strip_rows % 8 == 0 ? 1 : 2;
  k.strict = p->strict;
  k.pattern = p->pattern != NULL;
  return k;
}

static uint64_t hash_key(const key *k)
{
  uint64_t words[sizeof *k / sizeof(uint64_t)], hash = 0;
  memcpy(words, k, sizeof words);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    hash = mix(hash, words[i]);
  return hash;
}

void *esmm_recall_shape(const esmm_problem *p, bool touch)
{
  struct esmm_recall_tables *t = p->ctx->recall;
  if (!t)
    return NULL;
  const key k = key_of(p);
  directory *x = &t->of_shapes;
  if (x->newest != NONE && memcmp(&t->shapes[x->newest].key, &k, sizeof k) == 0)
    return t->shapes[x->newest].kept; /* the same call again */
  const uint64_t hash = hash_key(&k);
  for (int16_t i = x->bucket[hash % BUCKETS]; i != NONE; i = x->next[i])
    if (x->hash[i] == hash && memcmp(&t->shapes[i].key, &k, sizeof k) == 0) {
      if (touch)
        directory_touch(x, i);
      return t->shapes[i].kept;
    }
  return NULL;
}

void *esmm_recall_add_shape(const esmm_problem *p)
{
  struct esmm_recall_tables *t = p->ctx->recall;
  if (!t)
    return NULL;
  const int16_t i = directory_room(&t->of_shapes);
  t->shapes[i].key = key_of(p);
  directory_add(&t->of_shapes, i, hash_key(&t->shapes[i].key));
  t->shapes_made++;
  return t->shapes[i].kept;
}

void esmm_recall_clear_shapes(esmm_ctx *ctx)
{
  if (ctx->recall)
    directory_clear(&ctx->recall->of_shapes);
}

int64_t esmm_recall_shapes_made(const esmm_ctx *ctx)
{
  return ctx->recall ? ctx->recall->shapes_made : 0;
}

/* ---- what was seen ---- */

int64_t esmm_row_class(int64_t m)
{
  int64_t row_class = 0;
  while (row_class < MOST_ROW_CLASS && (int64_t)1 << row_class < m)
    row_class++;
  return row_class;
}

static uint64_t hash_seen(const esmm_weights *w, int64_t row_class)
{
  return mix(mix(0, w->serial), (uint64_t)row_class);
}

static int16_t find_seen(const struct esmm_recall_tables *t, const esmm_weights *w, int64_t m)
{
  const int64_t row_class = esmm_row_class(m);
  const uint64_t hash = hash_seen(w, row_class);
  for (int16_t i = t->of_seen.bucket[hash % BUCKETS]; i != NONE; i = t->of_seen.next[i])
    if (t->seen[i].serial == w->serial && t->seen[i].row_class == row_class)
      return i;
  return NONE;
}

esmm_seen *esmm_recall_seen(const esmm_ctx *ctx, const esmm_weights *w, int64_t m)
{
  const int16_t i = ctx->recall ? find_seen(ctx->recall, w, m) : NONE;
  return i == NONE ? NULL : &ctx->recall->seen[i];
}

/* Before an entry is used for something else: its reports must not come in then. */
static void settle(esmm_ctx *ctx, esmm_seen *seen)
{
  if (seen->pending)
    ctx->backend->settle_reports(ctx, seen);
}

esmm_seen *esmm_recall_use_seen(esmm_ctx *ctx, const esmm_weights *w, int64_t m)
{
  struct esmm_recall_tables *t = ctx->recall;
  if (!t)
    return NULL;
  int16_t i = find_seen(t, w, m);
  if (i != NONE) {
    directory_touch(&t->of_seen, i);
    return &t->seen[i];
  }
  i = directory_room(&t->of_seen);
  esmm_seen *seen = &t->seen[i];
  const bool full = i < t->of_seen.used;
  if (full)
    settle(ctx, seen);
  memset(seen, 0, sizeof *seen);
  seen->replaced = full;
  seen->serial = w->serial;
  seen->row_class = esmm_row_class(m);
  directory_add(&t->of_seen, i, hash_seen(w, seen->row_class));
  return seen;
}

int esmm_recall_place(const esmm_ctx *ctx, const esmm_seen *seen)
{
  return (int)(seen - ctx->recall->seen);
}

/* ---- the interface ---- */

static esmm_status check(esmm_ctx *ctx, const esmm_weights *w, int64_t m)
{
  const esmm_status status = esmm_check_weights(ctx, "weights", w);
  if (status != ESMM_OK)
    return status;
  return m > 0 ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_SHAPE, "m is %lld; it must be 1 or more", (long long)m);
}

esmm_status esmm_recall(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, esmm_recollection *out)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  const esmm_status status = check(ctx, weights, m);
  if (status != ESMM_OK)
    return status;
  esmm_recollection r = {0};
  if (!out)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "out is NULL");
  if (!esmm_struct_size(out->size, sizeof r))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "out->size is %zu; set it to sizeof *out, %zu in this version", out->size,
                     sizeof r);
  const esmm_seen *seen = esmm_recall_seen(ctx, weights, m);
  if (seen) {
    r.calls = seen->calls;
    r.reports = seen->reports;
    r.known = seen->known;
  }
  if (r.known) {
    r.density_a = seen->element;
    r.strip_density_a = seen->strip;
    r.joint_density = seen->joint_known ? seen->joint : seen->strip * weights->strip_density;
    r.strip_rows = seen->strip_rows;
  }
  r.size = out->size;
  memcpy(out, &r, out->size);
  return ESMM_OK;
}

static esmm_status check_densities(esmm_ctx *ctx, const esmm_recollection *in)
{
  const struct {
    const char *name;
    double value;
  } all[] = {
      {"density_a", in->density_a}, {"strip_density_a", in->strip_density_a}, {"joint_density", in->joint_density}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!(all[i].value >= 0.0 && all[i].value <= 1.0))
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "in->%s is %.9g; a density is from 0 to 1", all[i].name, all[i].value);
  if (in->density_a > in->strip_density_a + ROUNDED)
    return esmm_fail(
        ctx, ESMM_ERR_ARGUMENT,
        "in->density_a is %.9g and in->strip_density_a %.9g: a strip has a nonzero where an element is one",
        in->density_a, in->strip_density_a);
  if (in->joint_density > in->strip_density_a + ROUNDED)
    return esmm_fail(
        ctx, ESMM_ERR_ARGUMENT,
        "in->joint_density is %.9g and in->strip_density_a %.9g: no more can be in both than in A's strips",
        in->joint_density, in->strip_density_a);
  if (in->strip_rows != 0 && in->strip_rows != 32 && in->strip_rows != 128)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "in->strip_rows is %lld; it is 32, 128, or 0 for any",
                     (long long)in->strip_rows);
  return ESMM_OK;
}

esmm_status esmm_expect(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, const esmm_recollection *in)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_status status = check(ctx, weights, m);
  if (status != ESMM_OK)
    return status;
  if (!in)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "in is NULL");
  esmm_recollection r = {0};
  status = esmm_take_opts(ctx, "in", in, sizeof r, &r);
  if (status == ESMM_OK)
    status = check_densities(ctx, &r);
  if (status != ESMM_OK)
    return status;
  esmm_seen *seen = esmm_recall_use_seen(ctx, weights, m);
  if (!seen)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "this context does not remember (remember is -1, or ESMM_REMEMBER 0)");
  seen->known = true;
  seen->overflow_known = false;
  seen->reports = 0;
  seen->from = seen->calls;
  seen->joint_known = r.joint_density > 0.0 || r.strip_density_a == 0.0;
  seen->element = r.density_a;
  seen->strip = r.strip_density_a;
  seen->joint = r.joint_density;
  seen->strip_rows = r.strip_rows;
  return ESMM_OK;
}

esmm_status esmm_forget(esmm_ctx *ctx)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  struct esmm_recall_tables *t = ctx->recall;
  if (!t)
    return ESMM_OK;
  for (int i = 0; i < t->of_seen.used; i++)
    settle(ctx, &t->seen[i]);
  directory_clear(&t->of_seen);
  esmm_recall_clear_shapes(ctx);
  return ESMM_OK;
}
