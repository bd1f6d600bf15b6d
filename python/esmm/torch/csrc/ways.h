/*
 * ways.h: torch's own linear, for products that it may make faster than the library (race.h). For ops.cpp alone.
 */
#ifndef ESMM_TORCH_WAYS_H
#define ESMM_TORCH_WAYS_H

#include "race.h"
#include "tensors.h"

#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

/* Is an environment variable set to something else? */
bool is_not(const char *name, const char *usual)
{
  const char *const value = std::getenv(name);
  return value && *value && std::strcmp(value, usual) != 0;
}

/* Do variables ask for the library's kernels, its choice alone, or its number of threads? */
bool environment_asks()
{
  return is_not("ESMM_DETERMINISTIC", "0") || is_not("ESMM_FORCE", "auto") || is_not("ESMM_REMEMBER", "1") ||
         is_not("ESMM_THREADS", "");
}

int64_t rows_in(const View &x)
{
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims; i++)
    rows *= x.sizes[i];
  return rows;
}

/* Has torch the activation in place? In 16 bits its ReLU2 rounds twice, as in plain torch. Its SiLU of -inf is NaN. */
bool has_in_place(int64_t activation)
{
  return activation == ESMM_ACT_NONE || activation == ESMM_ACT_RELU || activation == ESMM_ACT_RELU2;
}

bool apply_in_place(const char *name, Owned *y, Failure *failure)
{
  StableIValue stack[1] = {boxed_value(y->release())};
  if (!dispatch(name, stack, failure))
    return false;
  *y = take(stack[0]);
  return true;
}

/* y = act(x weight' + bias); bias may be empty. */
bool product_by_torch(const Owned &x, const Owned &weight, const Owned &bias, int64_t activation, Owned *y,
                      Failure *failure)
{
  StableIValue stack[3];
  if (!again(x.get(), &stack[0], failure) || !again(weight.get(), &stack[1], failure))
    return false;
  stack[2] = boxed_value(static_cast<StableIValue *>(nullptr));
  if (bias) {
    auto given = std::make_unique<StableIValue>();
    if (!again(bias.get(), given.get(), failure))
      return false;
    stack[2] = boxed_value(given.release());
  }
  if (!dispatch("aten::linear", stack, failure))
    return false;
  *y = take(stack[0]);
  return (activation == ESMM_ACT_NONE || apply_in_place("aten::relu_", y, failure)) &&
         (activation != ESMM_ACT_RELU2 || apply_in_place("aten::square_", y, failure));
}

} // namespace

#endif
