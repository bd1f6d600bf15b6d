/* random_layer.c: one forward and one backward pass of a layer, against the float64 layer of ffn_oracle.h. */
#include "ffn_rig.h"
#include "random_calls.h"

void call_layer(world *w)
{
  static const struct {
    esmm_dtype dtype, hidden;
    double share;
  } kinds[] = {{ESMM_F32, ESMM_F32, 1e-6}, {ESMM_F32, ESMM_BF16, 1e-2}, {ESMM_BF16, ESMM_BF16, 2e-2}};
  const int kind = (int)below(w, 3);
  oracle o = {.tokens = about(w, 1, 60),
              .d_model = about(w, 1, 50),
              .d_hidden = about(w, 8, 90),
              .rank1 = chance(w, 0.2) ? 1 + below(w, 9) : 0,
              .rank2 = chance(w, 0.2) ? 1 + below(w, 9) : 0,
              .activation = ESMM_ACT_RELU + (esmm_activation)below(w, 2),
              .gated = chance(w, 0.5)};
  oracle_create(&o, th_next(&w->rng), 1);
  make_integers(&o, th_next(&w->rng), 0.9); /* no sum is next to 0, where a rounding would open or close the gate */
  if (chance(w, 0.5))
    kill_features(&o, 0.8, th_next(&w->rng));
  esmm_ffn_opts opts = opts_of(&o);
  opts.dtype = kinds[kind].hidden;
  opts.mode = chance(w, 0.3) ? ESMM_FFN_DENSE : ESMM_FFN_EXACT;
  say(w, "layer of %d tokens, %d to %d, ranks %d and %d, activation %d%s%s, kind %d", (int)o.tokens, (int)o.d_model,
      (int)o.d_hidden, (int)o.rank1, (int)o.rank2, (int)o.activation, o.gated ? ", gated" : "",
      opts.mode == ESMM_FFN_DENSE ? ", dense" : "", kind);
  rig r;
  rig_create(&r, &o, &opts, (layout){kinds[kind].dtype, any_order(w), below(w, 4)}, w->threads < 3 ? w->threads : 3);
  rig_run(&r);
  if (chance(w, 0.3)) /* a second pass through the same cache */
    rig_run(&r);
  oracle_forward(&o);
  oracle_backward(&o);
  check_all(w->now, &r, kinds[kind].share);
  rig_free(&r);
  oracle_free(&o);
}
