/*
 * bench_energy.c: esmm bench --energy: joules a product, and the cost of a million (--price).
 *
 * Counters of energy move in steps: some milliseconds on a CPU, up to a tenth of a second on a GPU. So a kernel is
 * called in a row for a second, and counted from one step to another: whole steps, whatever their length. The cache is
 * not emptied in between, as that takes energy too: this is a product among many, not the timed cold one.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const double warm_seconds = 0.1;   /* until others' threads sleep, and the clock has settled */
static const double least_seconds = 1;    /* from step to step */
static const double most_seconds = 4;     /* a counter that has not moved by then never will */
static const double batch_seconds = 5e-3; /* between looks at the counter */
enum { MOST_BATCH = 512, MOST_FAILURES = 3 };

int bench_energy_parse(bench *b)
{
  char number[64];
  if (!b->price_words)
    return CLI_GO;
  if (!b->energy)
    return cli_usage("--price is the price of energy: give --energy with it");
  const char *slash = strchr(b->price_words, '/');
  const size_t length = slash ? (size_t)(slash - b->price_words) : strlen(b->price_words);
  b->by_the_hour = slash && strcasecmp(slash, "/h") == 0;
  if (length >= sizeof number || (slash && !b->by_the_hour && strcasecmp(slash, "/kWh") != 0))
    return cli_usage("--price: %s is no price: 0.15 or 0.15/kWh for energy, 3.5/h for the machine", b->price_words);
  snprintf(number, sizeof number, "%.*s", (int)length, b->price_words);
  return cli_parse_double("--price", number, 0, 1e9, &b->price);
}

void bench_energy_open(bench *b)
{
  if (!b->energy)
    return;
  const char *colon = strchr(esmm_ctx_device(b->ctx), ':');
  if (b->gpu)
    (void)energy_open_gpu(&b->meter, colon ? (int)strtol(colon + 1, NULL, 10) : 0);
  else
    (void)energy_open_cpu(&b->meter);
}

double bench_energy_dollars(const bench *b, double joules, double seconds)
{
  if (!b->price_words)
    return NAN;
  return 1e6 * b->price * (b->by_the_hour ? seconds / 3600 : joules / 3.6e6);
}

/* ---- measuring ---- */

/* A look at the counter. */
typedef struct look {
  double joules, when;
  int64_t calls;
} look;

static esmm_status call_batch(bench *b, bench_data *data, const bench_contestant *c, int batch, int64_t *calls)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; i < batch && status == ESMM_OK; i++)
    status = bench_call(b, data, c, (int)((*calls)++ % INT32_MAX), NULL);
  if (status == ESMM_OK && b->gpu)
    status = esmm_ctx_synchronize(b->ctx);
  bench_finish_release(data);
  return status;
}

/* Calls until the counter moves, and `until` at least; false where the counter fails or stands still. */
static bool next_step(bench *b, bench_data *data, const bench_contestant *c, int batch, double until, look *at,
                      esmm_status *status)
{
  double before;
  const double began = cli_now();
  if (!energy_read(&b->meter, &before))
    return false;
  for (;;) {
    const double start = cli_now();
    do /* a look takes longer than some products do */
      *status = call_batch(b, data, c, batch, &at->calls);
    while (*status == ESMM_OK && cli_now() - start < batch_seconds);
    if (*status != ESMM_OK || !energy_read(&b->meter, &at->joules))
      return false;
    at->when = cli_now();
    if (at->joules > before && at->when >= until)
      return true;
    if (at->when < until)
      before = at->joules;
    if (at->when - fmax(began, until) > most_seconds) {
      snprintf(b->meter.reason, sizeof b->meter.reason, "the counter did not move within %g s", most_seconds);
      return false;
    }
    cli_progress_update(&b->progress, b->done, b->total);
  }
}

static esmm_status measure(bench *b, bench_data *data, bench_contestant *c)
{
  /* On a CPU calls are made one by one; a GPU has them queued, and bitmaps of C are kept until they were waited for. */
  const int most = b->epilogue.bitmap_rows ? BENCH_TIMERS : MOST_BATCH;
  const double wanted = batch_seconds / (c->median > 1e-7 ? c->median : 1e-7);
  const int batch = wanted < 1 ? 1 : wanted > most ? most : (int)wanted;
  esmm_status status = ESMM_OK;
  look first = {0};
  if (!next_step(b, data, c, batch, cli_now() + warm_seconds, &first, &status))
    return status;
  look last = first;
  if (!next_step(b, data, c, batch, first.when + least_seconds, &last, &status))
    return status;
  c->joules = (last.joules - first.joules) / (double)(last.calls - first.calls);
  c->watts = (last.joules - first.joules) / (last.when - first.when);
  return status;
}

int bench_energy(bench *b, bench_data *data, bench_result *result)
{
  for (int i = 0; i < result->count && b->energy && b->meter.source; i++) {
    bench_contestant *c = &result->contestants[i];
    const bool asked = i < result->ours || i == result->best || i >= result->peers;
    if (!asked || !(c->median > 0))
      continue;
    const esmm_status status = measure(b, data, c);
    if (status != ESMM_OK)
      return bench_call_failed(b, c, status);
    b->meter.failures = isnan(c->joules) ? b->meter.failures + 1 : 0;
    if (b->meter.failures == MOST_FAILURES) /* in a row: the rest need not wait for it */
      b->meter.source = NULL;
  }
  return CLI_GO;
}

/* ---- saying it ---- */

int bench_energy_fields(const bench *b, const bench_result *result, const bench_contestant *c, cli_field *out)
{
  const bench_contestant *best = result->best < 0 ? NULL : &result->contestants[result->best];
  const cli_field fields[] = {
      {"energy_source", b->meter.source, NAN, false},
      {"joules", NULL, c->joules, false},
      {"watts", NULL, c->watts, false},
      {"joules_baseline", NULL, best ? best->joules : NAN, false},
      {"watts_baseline", NULL, best ? best->watts : NAN, false},
      {"price", b->price_words, NAN, false},
      {"dollars_per_million", NULL, bench_energy_dollars(b, c->joules, c->median), false},
      {"dollars_per_million_baseline", NULL, best ? bench_energy_dollars(b, best->joules, best->median) : NAN, false},
  };
  if (!b->energy)
    return 0;
  memcpy(out, fields, sizeof fields);
  return sizeof fields / sizeof *fields;
}

static cli_table *new_table(const bench *b)
{
  const char *const heads[] = {b->suite  ? "product"
                               : b->list ? "line"
                                         : "density",
                               "kernel",
                               "J a product",
                               "W",
                               "dense J",
                               "dense W",
                               "dense J / J",
                               "$ a million",
                               "dense $"};
  const bool many = b->list || b->sweep_count;
  char align[16];
  snprintf(align, sizeof align, "%slrrrrr%s", many ? "r" : "", b->price_words ? "rr" : "");
  return cli_table_new(align, many ? heads : heads + 1);
}

static void add_row(const bench *b, const bench_data *data, const bench_contestant *c, const bench_contestant *best,
                    cli_table *t)
{
  const double ratio = best ? best->joules / c->joules : NAN;
  bench_report_place(b, data, t);
  cli_table_cell(t, CLI_PLAIN, "%s%s", c->peer || c->passes ? "peer: " : c->force[0] ? "" : "auto: ", c->name);
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(c->joules, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(c->watts, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(best ? best->joules : NAN, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(best ? best->watts : NAN, 3));
  cli_table_cell(t, CLI_PLAIN, isfinite(ratio) ? "%.2f x" : "-", ratio);
  if (!b->price_words)
    return;
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(bench_energy_dollars(b, c->joules, c->median), 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(best ? bench_energy_dollars(b, best->joules, best->median) : NAN, 3));
}

void bench_energy_add(const bench *b, const bench_data *data, const bench_result *result, bench_report *report)
{
  const bench_contestant *best = result->best < 0 ? NULL : &result->contestants[result->best];
  if (!b->energy || (!b->meter.source && !b->by_the_hour))
    return;
  if (!report->energy_table)
    report->energy_table = new_table(b);
  for (int i = 0; i < result->count; i++)
    if ((i < result->ours || i >= result->peers) && result->contestants[i].median > 0)
      add_row(b, data, &result->contestants[i], best, report->energy_table);
}

void bench_energy_title(const bench *b, char *out, size_t bytes)
{
  snprintf(out, bytes, "Energy, %s; calls in a row, caches as they leave them%s%s%s",
           b->meter.source ? energy_title(&b->meter) : "not known", b->price_words ? "; $ at " : "",
           b->price_words ? b->price_words : "", b->price_words && !strchr(b->price_words, '/') ? "/kWh" : "");
}
