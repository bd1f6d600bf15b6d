/*
 * nm_lists.h: up to LISTS_ROWS rows by N:M weights whose columns share their k's, 16 or more together. Included by
 * nm.h.
 *
 * The floor is the bytes of B. A strip's list says which k each vector of 16 values meets. So a row of A becomes a list
 * of nonzero a's, each with the place of its vector, and each panel of the strip is one pass over its values:
 *
 *     c[row][0..15] += a[row][k of slot] * value[slot][0..15]
 *
 * Values are prefetched while the list is made, to keep memory busy: where a strip is one panel wide, each has a list.
 * Rows after the first find the panel in the second-level cache.
 */
#define LISTS_ROWS 4
#define LISTS_PART 256                 /* terms summed before they are added to the whole, in LISTS_CHAINS chains */
#define LISTS_CHAINS 4                 /* one would wait for itself */
#define LISTS_SLOTS ((int64_t)1 << 28) /* a list holds places of 16 elements each as uint32_t: more would wrap */

static bool takes_lists(const esmm_problem *p)
{
  return p->m <= LISTS_ROWS && shares_lists(p->w) && p->w->nm.slots < LISTS_SLOTS;
}

typedef struct lists_layout {
  int64_t nc, blocks; /* panels of a block */
  int64_t room;       /* entries of a row's list */
  size_t at_offsets, at_sums, at_rows, at_met, bytes;
} lists_layout;

static lists_layout lists_lay_out(const esmm_problem *p)
{
  const esmm_nm_form *form = &p->w->nm;
  lists_layout l = {.room = form->slots + 64};
  l.nc = esmm_max(1, esmm_ceil_div(form->panels, 4 * (int64_t)p->threads));
  l.blocks = esmm_ceil_div(form->panels, l.nc);
  l.bytes = align_up((size_t)(p->m * l.room) * sizeof(float));
  l.at_offsets = set_aside(&l.bytes, p->m * l.room, sizeof(uint32_t));
  l.at_sums = set_aside(&l.bytes, p->m * l.nc * ESMM_HALF_COLS, sizeof(float));
  l.at_rows = set_aside(&l.bytes, p->m * p->k, sizeof(float));
  l.at_met = set_aside(&l.bytes, p->m * form->slots, sizeof(float));
  return l;
}

/* What each slot of a strip meets in the rows of A, met [m][slots]; the values of a panel are asked for meanwhile. */
static void gather_met(const esmm_nm_form *form, int64_t which, const float *a, int64_t ld, int64_t m,
                       const char *values, size_t vector_bytes, float *met)
{
  const unsigned char *list = form->index + (size_t)which * form->list_bytes;
  slot_walk at = walk_from(form, 0, 0);
  for (int64_t slot = 0; slot < form->slots; slot++, walk_on(form, &at)) {
    const float *from = a + at.base + esmm_nm_field(list, slot, form->bits);
    __builtin_prefetch(values + (size_t)slot * vector_bytes);
    for (int64_t r = 0; r < m; r++)
      met[r * form->slots + slot] = from[r * ld];
  }
}

/* sums [16] = the listed a's times their vectors of a panel */
ALWAYS void add_listed(const esmm_dtype dtype, const void *b, const float *values, const uint32_t *offsets,
                       int64_t count, float *sums)
{
  for (int64_t j = 0; j < ESMM_HALF_COLS; j += VEC) {
    vec all = vec_zero();
    for (int64_t i = 0; i < count;) {
      const int64_t end = esmm_min(count, i + LISTS_PART);
      vec part[LISTS_CHAINS];
      for (int x = 0; x < LISTS_CHAINS; x++)
        part[x] = vec_zero();
      for (; i + LISTS_CHAINS <= end; i += LISTS_CHAINS)
#pragma GCC unroll 4
        for (int x = 0; x < LISTS_CHAINS; x++)
          part[x] = vec_fma(vec_all(values + i + x), esmm_vec_load(b, dtype, offsets[i + x] + j), part[x]);
      for (; i < end; i++)
        part[0] = vec_fma(vec_all(values + i), esmm_vec_load(b, dtype, offsets[i] + j), part[0]);
      all = vec_add(all, vec_add(vec_add(part[0], part[1]), vec_add(part[2], part[3])));
    }
    vec_store(sums + j, all);
  }
}

static void lists_multiply(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const lists_layout *l = plan;
  const esmm_nm_form *form = &p->w->nm;
  const esmm_dtype dtype = p->w->dtype;
  const size_t vector_bytes = ESMM_HALF_COLS * esmm_dtype_size(dtype);
  const int64_t q0 = block * l->nc, panels = esmm_min(l->nc, form->panels - q0), ld_sums = l->nc * ESMM_HALF_COLS;
  float *values = (float *)(void *)scratch, *sums = (float *)(void *)(scratch + l->at_sums);
  float *met = (float *)(void *)(scratch + l->at_met);
  uint32_t *offsets = (uint32_t *)(void *)(scratch + l->at_offsets);
  int64_t counts[LISTS_ROWS], list = -1, ld;
  const double start = now_if_timed(p);
  const float *a = rows_of_a(&p->a, 0, p->m, 0, p->k, (float *)(void *)(scratch + l->at_rows), &ld);
  t->extract += now_if_timed(p) - start;
  for (int64_t q = 0; q < panels; q++) {
    const char *b = (const char *)form->values + (size_t)((q0 + q) * form->slots) * vector_bytes;
    if ((q0 + q) * ESMM_HALF_COLS / form->group_cols != list) {
      list = (q0 + q) * ESMM_HALF_COLS / form->group_cols;
      gather_met(form, list, a, ld, p->m, b, vector_bytes, met);
      for (int64_t r = 0; r < p->m; r++)
        counts[r] = list_nonzeros(met + r * form->slots, form->slots, 0, ESMM_HALF_COLS, values + r * l->room,
                                  offsets + r * l->room);
    }
    for (int64_t r = 0; r < p->m; r++) {
      const float *own = values + r * l->room;
      const uint32_t *places = offsets + r * l->room;
      float *to = sums + r * ld_sums + q * ESMM_HALF_COLS;
      switch (dtype) { /* each its own loop */
      case ESMM_F32:
        add_listed(ESMM_F32, b, own, places, counts[r], to);
        break;
      case ESMM_BF16:
        add_listed(ESMM_BF16, b, own, places, counts[r], to);
        break;
      case ESMM_F16:
        add_listed(ESMM_F16, b, own, places, counts[r], to);
        break;
      }
      t->terms += (double)counts[r] * (double)esmm_min(ESMM_HALF_COLS, p->n - (q0 + q) * ESMM_HALF_COLS);
    }
  }
  const int64_t col0 = q0 * ESMM_HALF_COLS;
  esmm_finish(p, 0, p->m, col0, esmm_min(panels * ESMM_HALF_COLS, p->n - col0), sums, ld_sums);
}

static size_t lists_workspace(const esmm_problem *p)
{
  return blocks_workspace(p, lists_lay_out(p).bytes);
}

static void lists_run(const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const lists_layout l = lists_lay_out(p);
  run_blocks(p, lists_multiply, &l, l.blocks, l.bytes, scratch, stats);
}

static void lists_units(const esmm_problem *p, double *units, int64_t *variant)
{
  *variant = 1;
  const esmm_nm_form *form = &p->w->nm;
  const double m = (double)p->m, columns = (double)(form->panels * ESMM_HALF_COLS), each = (double)form->slots;
  units[0] = m * columns * each * p->sample.element / VEC;
  units[1] = m * (double)p->k;
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * p->sample.strip[2]);
  units[3] = m * (double)form->strips * each;
  units[4] = m * columns / VEC;
  units[5] = 1.0;
}
