/*
 * tensors.h: torch's tensors by the C functions of its stable ABI, and errors without exceptions. For ops.cpp alone,
 * which says why.
 */
#ifndef ESMM_TORCH_TENSORS_H
#define ESMM_TORCH_TENSORS_H

#include <torch/csrc/stable/library.h>

#include <array>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "esmm_tools.h"

namespace {

using torch::stable::detail::to;

template <typename T> StableIValue boxed_value(T value)
{
  return torch::stable::detail::from(value);
}

/* ---- errors ---- */

/* Why a call failed; on the stack of the outermost frame, and nothing to destroy. */
struct Failure {
  char text[1024];
};

__attribute__((format(printf, 2, 3))) bool fail(Failure *failure, const char *format, ...)
{
  va_list words;
  va_start(words, format);
  std::vsnprintf(failure->text, sizeof failure->text, format, words);
  va_end(words);
  return false;
}

#define EXPECT(holds, ...)               \
  do {                                   \
    if (!(holds))                        \
      return fail(failure, __VA_ARGS__); \
  } while (0)

/* torch_exception_get_what_without_backtrace: what the last error in this thread was. From torch 2.13 on; an older one
   writes it to its log alone. */
const char *(*torch_error)();

bool fail_in_torch(Failure *failure, const char *where)
{
  const char *const text = torch_error ? torch_error() : nullptr;
  return fail(failure, "esmm: torch failed in %s%s%s", where, text && *text ? ": " : "", text ? text : "");
}

/* A function of torch's C interface, which gives a code where it throws inside. */
#define TORCH_DOES(call)                    \
  do {                                      \
    if ((call) != AOTI_TORCH_SUCCESS)       \
      return fail_in_torch(failure, #call); \
  } while (0)

/* What the library says of an argument: here it is no field of a struct. */
bool fail_as_library(Failure *failure, const char *text)
{
  const char *const mark = "opts->";
  size_t n = static_cast<size_t>(std::snprintf(failure->text, sizeof failure->text, "esmm: "));
  while (*text && n + 1 < sizeof failure->text)
    if (std::strncmp(text, mark, std::strlen(mark)) == 0)
      text += std::strlen(mark);
    else
      failure->text[n++] = *text++;
  failure->text[n] = 0;
  return false;
}

/* c10::detail::torchCheckFail: what TORCH_CHECK calls. */
using CheckFail = void (*)(const char *function, const char *file, uint32_t line, const char *text);
CheckFail check_fail;

/* ---- what torch has beside its stable ABI ---- */

/* at::TensorBase::_version, where torch has it under that name: every call asks for a version, and by name, through the
   stable ABI, that takes a sixth of a small product's time. */
int64_t (*quick_version)(AtenTensorHandle);

/*
 * at::detail::empty_strided_cuda, likewise: the stable ABI's way goes through the dispatcher.
 * The types are laid out and passed as torch's are: IntArrayRef, optional<Device>,
 * TensorBase. A tensor's handle is the address of a TensorBase that is deleted with `delete`.
 */
struct Numbers {
  const int64_t *data;
  size_t length;
};
struct Place {
  int8_t type, index;
};
struct TensorBase {
  void *impl = nullptr;
  TensorBase() = default;
  TensorBase(TensorBase &&o) noexcept : impl(std::exchange(o.impl, nullptr)) {}
  TensorBase &operator=(TensorBase &&) = delete;
  ~TensorBase() {} /* its owner always moves it on */
};
using EmptyCuda = TensorBase (*)(Numbers, Numbers, int8_t, std::optional<Place>);
EmptyCuda empty_cuda;

/* torch's numbers for dtypes and devices. */
struct Codes {
  int32_t f32, bf16, f16, i32, cpu, cuda;
};
Codes codes;

int32_t library_dtype(int32_t type) /* -1: one that it does not have */
{
  return type == codes.f32 ? ESMM_F32 : type == codes.bf16 ? ESMM_BF16 : type == codes.f16 ? ESMM_F16 : -1;
}

int32_t torch_type(int32_t dtype)
{
  return dtype == ESMM_F32 ? codes.f32 : dtype == ESMM_BF16 ? codes.bf16 : codes.f16;
}

/* ---- tensors ---- */

/* A tensor's handle that is ours to delete. */
class Owned {
public:
  Owned() = default;
  explicit Owned(AtenTensorHandle handle) : handle_(handle) {}
  Owned(Owned &&o) noexcept : handle_(o.release()) {}
  Owned &operator=(Owned &&o) noexcept
  {
    std::swap(handle_, o.handle_);
    return *this;
  }
  ~Owned()
  {
    if (handle_)
      aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  explicit operator bool() const { return handle_ != nullptr; }

private:
  AtenTensorHandle handle_ = nullptr;
};

/* Owns the handle in a value that the stable ABI returned. */
Owned take(StableIValue value)
{
  return Owned(to<AtenTensorHandle>(value));
}

/* Tensor?: NULL, or the address of the value, which is ours, too. */
Owned take_optional(StableIValue value)
{
  StableIValue *const at = to<StableIValue *>(value);
  if (!at)
    return Owned();
  Owned made = take(*at);
  delete at;
  return made;
}

/* A second handle of the same tensor, for a function that takes one. */
bool again(AtenTensorHandle t, StableIValue *value, Failure *failure)
{
  AtenTensorHandle made = nullptr;
  TORCH_DOES(aoti_torch_new_tensor_handle(t, &made));
  *value = boxed_value(made);
  return true;
}

/* A tensor's properties, each asked for once. */
struct View {
  AtenTensorHandle handle;
  void *data;
  const int64_t *sizes, *strides;
  int64_t dims;
  int32_t type;   /* torch's number */
  int32_t dtype;  /* ESMM_F32, _BF16, _F16; -1: another */
  int32_t device; /* -1 for the CPU */
  int32_t place;  /* torch's number for the kind of device */
};

bool look(AtenTensorHandle handle, View *v, Failure *failure)
{
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t index = 0;
  v->handle = handle;
  TORCH_DOES(aoti_torch_get_data_ptr(handle, &v->data));
  TORCH_DOES(aoti_torch_get_sizes(handle, &sizes));
  TORCH_DOES(aoti_torch_get_strides(handle, &strides));
  TORCH_DOES(aoti_torch_get_dim(handle, &v->dims));
  TORCH_DOES(aoti_torch_get_dtype(handle, &v->type));
  TORCH_DOES(aoti_torch_get_device_type(handle, &v->place));
  v->sizes = sizes;
  v->strides = strides;
  v->dtype = library_dtype(v->type);
  v->device = -1;
  if (v->place == codes.cuda) {
    TORCH_DOES(aoti_torch_get_device_index(handle, &index));
    v->device = index;
  }
  return true;
}

/* Of the dtypes that are not accepted. */
const char *dtype_name(int32_t type)
{
  const std::pair<int32_t, const char *> names[] = {
      {aoti_torch_dtype_float64(), "float64"}, {aoti_torch_dtype_int64(), "int64"}, {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},     {aoti_torch_dtype_int8(), "int8"},   {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_bool(), "bool"},
  };
  for (const auto &[code, name] : names)
    if (code == type)
      return name;
  return "of another dtype";
}

bool check_dtype(const View &v, const char *what, Failure *failure)
{
  EXPECT(v.dtype >= 0, "esmm: %s is %s: it has to be float32, bfloat16 or float16", what, dtype_name(v.type));
  return true;
}

bool check_device(const View &v, const View &x, const char *what, Failure *failure)
{
  if (v.device == x.device && v.place == x.place)
    return true;
  char names[2][32];
  const View *const both[2] = {&v, &x};
  for (int i = 0; i < 2; i++)
    if (both[i]->device >= 0)
      std::snprintf(names[i], sizeof names[i], "cuda:%d", both[i]->device);
    else
      std::snprintf(names[i], sizeof names[i], "%s", both[i]->place == codes.cpu ? "the CPU" : "another device");
  return fail(failure, "esmm: %s is on %s, and x is on %s", what, names[0], names[1]);
}

bool is_contiguous(const View &v)
{
  int64_t step = 1;
  for (int64_t i = v.dims - 1; i >= 0; i--) {
    if (v.sizes[i] != 1 && v.strides[i] != step)
      return false;
    step *= v.sizes[i];
  }
  return true;
}

/* A new tensor without values. */
bool new_tensor(const int64_t *sizes, int64_t dims, int32_t type, const View &like, Owned *made, Failure *failure)
{
  std::array<int64_t, 8> strides;
  EXPECT(dims <= 8, "esmm: x has %" PRId64 " dimensions; 8 is the most", dims);
  int64_t step = 1;
  for (int64_t i = dims - 1; i >= 0; i--) {
    strides[static_cast<size_t>(i)] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  if (like.device >= 0 && empty_cuda) {
    const auto length = static_cast<size_t>(dims);
    const Place place = {static_cast<int8_t>(like.place), static_cast<int8_t>(like.device)};
    *made = Owned(reinterpret_cast<AtenTensorHandle>(
        new TensorBase(empty_cuda({sizes, length}, {strides.data(), length}, static_cast<int8_t>(type), place))));
    return true;
  }
  AtenTensorHandle handle = nullptr;
  const int32_t index = like.device >= 0 ? like.device : 0;
  TORCH_DOES(aoti_torch_empty_strided(dims, sizes, strides.data(), type, like.place, index, &handle));
  *made = Owned(handle);
  return true;
}

/* Another operator, of torch or of _ops.py; what it takes and gives is on the stack. */
bool dispatch(const char *name, StableIValue *stack, Failure *failure)
{
  if (torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS)
    return fail_in_torch(failure, name);
  return true;
}

/* t as rows that lie one after the other, in `type`; an older copy is written again where there is one. */
bool copy_rows(const View &t, int32_t type, Owned *made, Failure *failure)
{
  if (!*made && !new_tensor(t.sizes, t.dims, type, t, made, failure))
    return false;
  StableIValue stack[3];
  if (!again(made->get(), &stack[0], failure) || !again(t.handle, &stack[1], failure))
    return false;
  stack[2] = boxed_value(false);
  if (!dispatch("aten::copy_", stack, failure))
    return false;
  take(stack[0]);
  return true;
}

} // namespace

#endif
