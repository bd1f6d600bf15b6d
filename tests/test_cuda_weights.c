/*
 * test_cuda_weights.c: what a GPU keeps of B, and what a call makes of it, on the driver of fake_cuda.c: no GPU is
 * needed, and no result is looked at. test_cuda.c looks at those.
 */
#include "cuda/cuda.h"
#include "fake_gpu.h"

/* ---- what is kept of B ---- */

static esmm_prepare_bits_params bits; /* of the last launch */

static void note_bits(const char *name, const void *params)
{
  if (strcmp(name, "esmm_prepare_bits") == 0)
    memcpy(&bits, params, sizeof bits);
}

/* Of 16 bits: B's rows and little else. In strict weights every bit is set, of strips and of tiles. */
static void weights_of_16_bits(void **state)
{
  (void)state;
  static const int64_t shapes[][2] = {{1, 1}, {70, 129}, {96, 128}, {1000, 1024}, {7, 0}, {0, 5}};
  meter m = {0};
  esmm_ctx *ctx = must_create(&m);
  fake->kernel = note_bits;
  for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
    const int64_t k = shapes[i / 2][0], n = shapes[i / 2][1], tiles = (n + 127) / 128, words = (k + 31) / 32;
    esmm_matrix b = th_matrix_alloc(k, n, i % 2 ? ESMM_F16 : ESMM_BF16);
    b.order = i % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    esmm_prepare_opts opts = {.size = sizeof opts, .strict = 1, .max_bytes_ratio = 1};
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare(ctx, &b, &opts, &w), ESMM_OK);
    const esmm_cuda_weights *device = esmm_cuda_of(w);
    assert_int_equal(device->rows_ld, 128 * tiles);
    assert_int_equal(device->rows % 256, 0);
    assert_true(device->strips.data == 0 && device->columns == 0);
    assert_int_equal(w->forms, ESMM_FORM(ROWS16));
    assert_true(w->makes & ESMM_FORM(STRIPS)); /* for the call, which takes time */
    const esmm_kernel reader = {.reads = ESMM_FORM(STRIPS)};
    assert_true(esmm_cuda_seconds_before(&reader, &(esmm_problem){.ctx = ctx, .w = w, .k = k}) > 0);
    const size_t padded = sizeof(uint16_t) * (size_t)(128 * tiles * k);
    assert_true(w->bytes >= padded && w->bytes <= padded + padded / 64 + (size_t)k * 8 + 4096);
    if (k > 0 && n > 0) { /* what sets every bit, and makes the tiles' */
      assert_int_equal(bits.strict, 1);
      assert_true(bits.bits == device->strips.bits && bits.tiles == device->tiles && bits.alive == device->alive);
      assert_true(bits.k == k && bits.words == words && bits.strips == (n + 31) / 32);
      assert_true(bits.tile_alive == device->tile_alive && w->full);
    }
    esmm_weights_free(w);
    w = NULL;
    opts.max_bytes_ratio = 0.5;
    assert_int_equal(esmm_prepare(ctx, &b, &opts, &w), k && n ? ESMM_ERR_UNSUPPORTED : ESMM_OK);
    esmm_weights_free(w);
    free(b.data);
  }
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  fake->kernel = NULL;
  check_balance("16-bit weights");
}

/* Of fp32, formats other than dense are the CPU's, prepared here or loaded. */
static void formats_are_refused(void **state)
{
  (void)state;
  const int64_t pointers[3] = {0, 1, 2}, columns[2] = {1, 0};
  const float blocks[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const esmm_bsr bsr = {.size = sizeof bsr,
                        .rows = 4,
                        .cols = 4,
                        .block_rows = 2,
                        .block_cols = 2,
                        .index_bits = 64,
                        .blocks = 2,
                        .row_pointers = pointers,
                        .column_indices = columns,
                        .values = blocks};
  char path[64];
  (void)snprintf(path, sizeof path, "/tmp/esmm_cuda_formats_%ld", (long)getpid());
  meter m = {0};
  esmm_ctx *ctx = must_create(&m), *cpu = th_ctx_on("cpu", 1);
  esmm_matrix b = th_matrix_alloc(8, 8, ESMM_F32);
  for (int format = ESMM_FORMAT_BSR; format <= ESMM_FORMAT_NM; format++) {
    const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = (esmm_format_kind)format};
    esmm_weights *w = NULL;
    th_expect("prepare", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "for the CPU",
              esmm_format_str((esmm_format_kind)format));
    th_expect("blocks", esmm_prepare_bsr(ctx, &bsr, &opts, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx),
              "for the CPU", "");
    assert_null(w);
    assert_int_equal(esmm_prepare(cpu, &b, &opts, &w), ESMM_OK);
    assert_int_equal(esmm_weights_save(cpu, w, path), ESMM_OK);
    esmm_weights_free(w);
    th_expect("load", esmm_weights_load(ctx, path, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "for the CPU", "");
    assert_null(w);
  }
  assert_int_equal(unlink(path), 0);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare_bsr(ctx, &bsr, NULL, &w), ESMM_OK); /* dense weights of blocks */
  esmm_weights_free(w);

  free(b.data);
  esmm_ctx_free(cpu);
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance("formats");
}

/* Launches and what is kept of N:M weights, by their format and the limit of bytes. */
static void weights_of_groups(void **state)
{
  (void)state;
  static const struct {
    int keep, group, cols;
    double ratio;
    unsigned forms;
  } rows[] = {
      {2, 4, 1, 0, ESMM_FORM(NM16) | ESMM_FORM(ROWS16)},
      {2, 4, 1, 1.5, ESMM_FORM(NM16)},
      {2, 4, 1, 1.6, ESMM_FORM(NM16) | ESMM_FORM(ROWS16)},
      {2, 4, 5, 0.6, ESMM_FORM(NM16)},
      {1, 3, 1, 0.6, ESMM_FORM(NM16)},
      {2, 8, 1, 0.6, ESMM_FORM(NM16)},
      {2, 6, 1, 0, ESMM_FORM(ROWS16)},
      {4, 8, 1, 1, ESMM_FORM(ROWS16)},
      {4, 8, 16, 2, ESMM_FORM(ROWS16)},
      {2, 4, 1, 0.5, 0},
      {2, 6, 1, 0.9, 0},
      {7, 8, 1, 0.99, 0},
  };
  meter m = {0};
  esmm_ctx *ctx = must_create(&m);
  for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
    const int64_t k = 200, n = 300;
    esmm_matrix b = th_matrix_alloc(k, n, i % 2 ? ESMM_F16 : ESMM_BF16);
    const esmm_prepare_opts opts = {.size = sizeof opts,
                                    .max_bytes_ratio = rows[i / 2].ratio,
                                    .format = {.kind = ESMM_FORMAT_NM,
                                               .keep = rows[i / 2].keep,
                                               .group = rows[i / 2].group,
                                               .group_cols = rows[i / 2].cols}};
    esmm_weights *w = NULL;
    const esmm_status status = esmm_prepare(ctx, &b, &opts, &w);
    if (rows[i / 2].forms == 0) {
      th_expect("prepare", status, ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "max_bytes_ratio", "");
    } else {
      assert_int_equal(status, ESMM_OK);
      assert_int_equal(w->forms, rows[i / 2].forms);
      assert_int_equal(w->makes, w->forms & ESMM_FORM(ROWS16) ? ESMM_FORM(STRIPS) : 0);
      const esmm_cuda_weights *device = esmm_cuda_of(w);
      assert_true((device->nm != 0) == ((w->forms & ESMM_FORM(NM16)) != 0) && device->nm % 256 == 0);
      assert_true(device->strips.bits && device->strips.strips == (n + 31) / 32);
      assert_true((device->rows != 0) == ((w->forms & ESMM_FORM(ROWS16)) != 0));
      esmm_weights_info info = {.size = sizeof info};
      assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
      assert_true(info.format.kind == ESMM_FORMAT_NM && info.format.keep == rows[i / 2].keep &&
                  info.format.group == rows[i / 2].group && info.format.group_cols == rows[i / 2].cols);
    }
    esmm_weights_free(w);
    free(b.data);
  }
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance("groups");
}

/* A product with 2:4 weights, of many rows or of few: the kernels that read them, and the dense ones where there is a
   copy for those. */
static void groups_and_their_copy(void **state)
{
  (void)state;
  static const int kinds[] = {80, 90, 100};
  for (int i = 0; i < 3 * 2 * 2 * 2; i++) {
    meter m = {0};
    fake->sm = kinds[i % 3];
    const bool copy = i / 3 % 2, few = i / 12;
    const esmm_dtype dtype = i / 6 % 2 ? ESMM_F16 : ESMM_BF16;
    const char *name = dtype == ESMM_F16 ? "f16" : "bf16";
    data d = make_data_of(dtype, dtype);
    esmm_ctx *ctx = must_create(&m);
    esmm_weights *w = NULL;
    const esmm_prepare_opts opts = {
        .size = sizeof opts, .format.kind = ESMM_FORMAT_NM, .max_bytes_ratio = copy ? 3 : 0.6};
    const esmm_status prepared = esmm_prepare(ctx, &d.b, &opts, &w);
    if (fake->sm != 90 && !copy) { /* only Hopper multiplies 2:4 of more than 16 rows */
      th_expect("prepare", prepared, ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "max_bytes_ratio", "1.56");
      esmm_ctx_free(ctx);
      free_data(&d);
      continue;
    }
    assert_int_equal(prepared, ESMM_OK);
    if (few)
      d.a.rows = d.c.rows = 12;
    const struct {
      const char *kernel;
      bool runs;
    } rows[] = {{"nm_%s_sm90a", fake->sm == 90},
                {"decode_nm_%s", few},
                {"dense_%s_mma", copy},
                {"decode_%s", few && copy},
                {"dense_%s_sm90a", copy && fake->sm == 90}};
    for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
      char force[64];
      (void)snprintf(force, sizeof force, rows[j].kernel, name);
      const esmm_matmul_opts o = {.size = sizeof o, .force = force};
      const esmm_status status = esmm_matmul(ctx, &d.a, w, &d.c, &o, NULL);
      if (status != (rows[j].runs ? ESMM_OK : ESMM_ERR_UNSUPPORTED))
        fail_msg("%s on sm_%d, copy %d: %s: %s", force, fake->sm, copy, esmm_status_str(status), esmm_ctx_error(ctx));
    }
    esmm_verdict verdicts[96];
    int count = 96;
    assert_int_equal(esmm_matmul(ctx, &d.a, w, &d.c, NULL, NULL), ESMM_OK);
    assert_int_equal(esmm_explain(ctx, &d.a, w, &d.c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
    for (int j = 0; j < count; j++)
      if (verdicts[j].chosen)
        assert_true((strstr(verdicts[j].text, "dense copy") != NULL) == (strstr(verdicts[j].kernel, "nm_") == NULL));
    esmm_weights_free(w);
    esmm_ctx_free(ctx);
    free_data(&d);
    assert_int_equal(m.live, 0);
    check_balance("groups and their copy");
  }
}

/* All that is done with 2:4 weights and on the way to them, or with blocks; the first failure. */
static esmm_status use_format(esmm_ctx *ctx, esmm_format_kind kind, const data *d, esmm_matrix *on_gpu,
                              esmm_matrix *back)
{
  const esmm_prune_opts prune = {.size = sizeof prune, .format.kind = ESMM_FORMAT_NM, .input_norms = back->data};
  const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = kind, .max_bytes_ratio = 0.6};
  esmm_weights *w = NULL;
  int64_t k, col;
  esmm_status status = kind == ESMM_FORMAT_NM ? esmm_prune(ctx, on_gpu, &prune, NULL) : ESMM_OK;
  if (status == ESMM_OK && kind == ESMM_FORMAT_NM)
    status = esmm_format_check(ctx, on_gpu, &prune.format, &k, &col);
  if (status == ESMM_OK)
    status = esmm_prepare(ctx, on_gpu, &opts, &w);
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &d->a, w, (esmm_matrix *)&d->c, NULL, NULL);
  if (status == ESMM_OK)
    status = esmm_weights_to_dense(ctx, w, back);
  esmm_weights_free(w);
  return status;
}

/* Lists of blocks of 32 x 32 are kept where cells have more than the caller's blocks, and only there does their kernel
   run. */
static void lists_of_narrow_blocks(void **state)
{
  (void)state;
  static const struct {
    int rows, cols;
    bool narrow;
  } blocks[] = {{32, 32, true},  {64, 32, true},   {32, 64, true},   {96, 128, true},  {1, 7, true},
                {64, 64, false}, {128, 64, false}, {64, 192, false}, {128, 128, false}};
  fake->sm = 90;
  for (size_t i = 0; i < 2 * sizeof blocks / sizeof *blocks; i++) {
    const int64_t rows = 200, n = 300, k = 260;
    const esmm_dtype dtype = i % 2 ? ESMM_F16 : ESMM_BF16;
    meter m = {0};
    esmm_ctx *ctx = must_create(&m);
    esmm_matrix a = th_matrix_alloc(rows, k, dtype), b = th_matrix_alloc(k, n, dtype),
                c = th_matrix_alloc(rows, n, dtype);
    const esmm_prepare_opts prepare = {
        .size = sizeof prepare,
        .format = {.kind = ESMM_FORMAT_BSR, .block_rows = blocks[i / 2].rows, .block_cols = blocks[i / 2].cols}};
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .force = i % 2 ? "bsr_narrow_f16_sm90a" : "bsr_narrow_bf16_sm90a"};
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare(ctx, &b, &prepare, &w), ESMM_OK);
    assert_int_equal(esmm_cuda_of(w)->blocks.narrow.tiles, blocks[i / 2].narrow ? 2 : 0);
    const esmm_status status = esmm_matmul(ctx, &a, w, &c, &opts, NULL);
    if (blocks[i / 2].narrow)
      assert_int_equal(status, ESMM_OK);
    else
      th_expect("narrow", status, ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "no lists of narrower ones", "");
    esmm_weights_free(w);
    esmm_ctx_free(ctx);
    free(a.data);
    free(b.data);
    free(c.data);
    assert_int_equal(m.live, 0);
    check_balance("narrow blocks");
  }
}

/* Each call of the driver fails in turn, then each allocation: nothing is lost, and the next time all is well. */
static void formats_survive_failures(void **state)
{
  (void)state;
  for (int i = 0; i < 4; i++)
    for (int64_t n = 1;; n++) {
      const int kind = i % 2;
      const esmm_format_kind format = i / 2 ? ESMM_FORMAT_BSR : ESMM_FORMAT_NM;
      assert_true(n < 1000);
      reset();
      meter m = {0};
      data d = make_data_of(ESMM_BF16, ESMM_BF16);
      esmm_matrix on_gpu, back = th_matrix_alloc(d.b.rows, d.b.cols, ESMM_BF16);
      memset(back.data, 0, th_matrix_bytes(&back)); /* the norms, too */
      esmm_ctx *ctx = must_create(&m);
      assert_int_equal(place(ctx, &d.b, &on_gpu), ESMM_OK);
      fake->fail_at = kind == 0 ? n : 0;
      fake->result = 999; /* CUDA_ERROR_UNKNOWN */
      m.fail_at = kind == 1 ? m.calls + n : 0;
      const esmm_status status = use_format(ctx, format, &d, &on_gpu, &back);
      const bool reached = kind == 0 ? fake->failed != NULL : m.failed;
      if (!reached)
        assert_int_equal(status, ESMM_OK);
      if (reached && kind == 1) /* without its memory of calls a context goes on */
        assert_true(status == ESMM_ERR_MEMORY || status == ESMM_OK);
      fake->fail_at = 0;
      m.fail_at = 0;
      assert_int_equal(use_format(ctx, format, &d, &on_gpu, &back), ESMM_OK);
      esmm_memory_free(ctx, on_gpu.data);
      esmm_ctx_free(ctx);
      free_data(&d);
      free(back.data);
      assert_int_equal(m.live, 0);
      check_balance("formats that fail");
      if (!reached)
        break;
    }
}

/* ---- what is made of it for a call ---- */

/* Launches of one product without statistics, and that it does not wait. */
static int64_t launches_of(const char *force, esmm_dtype a, esmm_dtype b)
{
  meter m = {0};
  data d = make_data_of(a, b);
  esmm_ctx *ctx = must_create(&m);
  esmm_weights *w = NULL;
  esmm_matrix on_gpu, c;
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  assert_int_equal(esmm_prepare(ctx, &d.b, NULL, &w), ESMM_OK);
  assert_int_equal(place(ctx, &d.a, &on_gpu), ESMM_OK);
  assert_int_equal(place(ctx, &d.c, &c), ESMM_OK);
  const int64_t launches = fake->launches, waits = fake->synchronizations;
  if (esmm_matmul(ctx, &on_gpu, w, &c, &opts, NULL) != ESMM_OK)
    fail_msg("%s: %s", force ? force : "the plan", esmm_ctx_error(ctx));
  const int64_t launched = fake->launches - launches;
  assert_int_equal(fake->synchronizations, waits);
  esmm_memory_free(ctx, on_gpu.data);
  esmm_memory_free(ctx, c.data);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  free_data(&d);
  assert_int_equal(m.live, 0);
  check_balance("a product");
  return launched;
}

/* Kernels that read B as fp32 strips need a launch more where B is 16-bit: whatever A is, they can run. */
static void strips_for_the_call(void **state)
{
  (void)state;
  static const char *const names[] = {"joint_f32", "dense_f32_mma"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
      const int64_t kept = launches_of(names[i], (esmm_dtype)dtype, ESMM_F32);
      assert_int_equal(launches_of(names[i], (esmm_dtype)dtype, ESMM_BF16), kept + 1);
      assert_int_equal(launches_of(names[i], (esmm_dtype)dtype, ESMM_F16), kept + 1);
    }
}

/* Every pair of dtypes has a kernel, with and without cuBLAS, on GPUs of all kinds; the plan never waits. */
static void every_dtype_runs(void **state)
{
  (void)state;
  for (int i = 0; i < 3 * 3 * 2 * 3; i++) {
    static const int kinds[] = {80, 90, 100};
    fake->cublas = i / 9 % 2 ? 0 : NO_CUBLAS;
    fake->sm = kinds[i / 18];
    (void)launches_of(NULL, (esmm_dtype)(i % 3), (esmm_dtype)(i / 3 % 3));
  }
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(weights_of_16_bits),     TEST(formats_are_refused),
                                    TEST(weights_of_groups),      TEST(groups_and_their_copy),
                                    TEST(lists_of_narrow_blocks), TEST(formats_survive_failures),
                                    TEST(strips_for_the_call),    TEST(every_dtype_runs)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("weights, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("weights", with, NULL, NULL);
}
