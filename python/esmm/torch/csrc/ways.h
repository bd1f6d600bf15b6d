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

/* Does an environment variable ask for something? */
bool asks(const char *name)
{
  const char *const value = std::getenv(name);
  return value && *value && std::strcmp(value, "0") != 0;
}

int64_t rows_in(const View &x)
{
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims; i++)
    rows *= x.sizes[i];
  return rows;
}

/* An activation that torch has in place; NULL: it has none that needs no more arguments. */
const char *in_place(int64_t activation)
{
  return activation == ESMM_ACT_RELU || activation == ESMM_ACT_RELU2 ? "aten::relu_"
         : activation == ESMM_ACT_SILU                               ? "aten::silu_"
                                                                     : nullptr;
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
  const char *const name = in_place(activation);
  return (!name || apply_in_place(name, y, failure)) &&
         (activation != ESMM_ACT_RELU2 || apply_in_place("aten::square_", y, failure));
}

} // namespace

#endif
