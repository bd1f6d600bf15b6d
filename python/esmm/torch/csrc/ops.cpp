/*
 * ops.cpp: the product as a torch operator in C++, for callers to whom ten microseconds of Python a call matter.
 *
 * _ops.py declares the operators and has kernels of its own, in Python, that do the same. Where a compiler is at hand,
 * _build.py compiles this file once and loads it, and its kernels take the place of those. It is written in torch's
 * stable ABI (2.10 and later), and finds libesmm through the path that esmm_torch_bind is given: the file that Python
 * has open already.
 *
 * Prepared weights are looked up by the tensor that they were made of: address, shape, strides, dtype, device, format
 * and version counter. What is not there is prepared by Python (esmm::_prepare), which also keeps the tensor's memory
 * from being given away while its address is in the table, and calls esmm_torch_forget when it lets go of it.
 */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "esmm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

/* ---- errors ---- */

/* torch's own macros put the place in this file before the text. */
template <typename... Parts> [[noreturn]] void fail(const Parts &...parts)
{
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

#define ESMM_OPS_EXPECT(holds, ...) \
  do {                              \
    if (!(holds))                   \
      fail(__VA_ARGS__);            \
  } while (0)

/* What the library says of an argument: here it is no field of a struct. */
std::string in_python(std::string text)
{
  for (size_t at; (at = text.find("opts->")) != std::string::npos;)
    text.erase(at, sizeof "opts->" - 1);
  return text;
}

/* ---- libesmm ---- */

struct Library {
  decltype(&esmm_ctx_create) ctx_create;
  decltype(&esmm_ctx_free) ctx_free;
  decltype(&esmm_ctx_error) ctx_error;
  decltype(&esmm_ctx_set_stream) ctx_set_stream;
  decltype(&esmm_weights_free) weights_free;
  decltype(&esmm_matmul) matmul;
};
Library esmm;

using CudaStream = AOTITorchError (*)(int32_t, void **);
CudaStream current_cuda_stream;    /* torch's own; NULL where it has none */
void *(*ask_cuda_stream)(int32_t); /* the same by way of Python */

/* ---- contexts ---- */

/*
 * A context serves one thread at a time, so a call takes one and gives it back. The one given back last is taken first:
 * a program with one thread has one context for each device. They are never freed: at exit the CUDA driver may be gone
 * before this library's destructors run.
 */
struct Idle {
  int64_t key; /* device and threads */
  esmm_ctx *ctx;
};

struct Contexts {
  std::mutex mutex;
  std::vector<Idle> idle; /* a few */
};
Contexts &contexts = *new Contexts;

class Context {
public:
  explicit Context(int32_t device) /* -1: the CPU */
  {
    static const bool named = std::getenv("ESMM_THREADS") != nullptr;
    const int threads = device >= 0 || named ? 0 : static_cast<int>(torch::stable::get_num_threads());
    key_ = static_cast<int64_t>(device) * 4096 + threads;
    {
      std::lock_guard<std::mutex> lock(contexts.mutex);
      for (size_t i = contexts.idle.size(); i-- > 0 && !ctx_;)
        if (contexts.idle[i].key == key_) {
          ctx_ = contexts.idle[i].ctx;
          contexts.idle.erase(contexts.idle.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    if (!ctx_)
      create(device, threads);
    if (device >= 0 && !follow_stream(device)) {
      const std::string text = esmm.ctx_error(ctx_);
      give_back();
      fail("esmm: ", text);
    }
  }
  ~Context() { give_back(); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  esmm_ctx *get() const { return ctx_; }

private:
  void give_back()
  {
    std::lock_guard<std::mutex> lock(contexts.mutex);
    contexts.idle.push_back({key_, ctx_});
  }
  void create(int32_t device, int threads)
  {
    char text[512] = "";
    const std::string name = device < 0 ? "cpu" : "cuda:" + std::to_string(device);
    esmm_ctx_opts opts = {};
    opts.size = sizeof opts;
    opts.device = name.c_str();
    opts.threads = threads;
    opts.error = text;
    opts.error_size = sizeof text;
    const esmm_status status = esmm.ctx_create(&ctx_, &opts);
    ESMM_OPS_EXPECT(status == ESMM_OK, "esmm: no context for ", name, ": ", text);
  }
  bool follow_stream(int32_t device)
  {
    void *stream = nullptr;
    if (!current_cuda_stream || current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS)
      stream = ask_cuda_stream(device);
    return esmm.ctx_set_stream(ctx_, stream) == ESMM_OK;
  }
  int64_t key_ = 0;
  esmm_ctx *ctx_ = nullptr;
};

/* ---- what Python prepared ---- */

struct Key {
  const void *data;
  int64_t rows, cols, row_stride, col_stride;
  int64_t format; /* as _formats.py codes it; BIAS: a vector as fp32 */
  int32_t source, target, device;
  bool operator==(const Key &o) const
  {
    return data == o.data && rows == o.rows && cols == o.cols && row_stride == o.row_stride &&
           col_stride == o.col_stride && format == o.format && source == o.source && target == o.target &&
           device == o.device;
  }
};
constexpr int64_t BIAS = -1;
constexpr int64_t TURNED = INT64_C(1) << 40; /* in a format: B is the weight as it is */

struct KeyHash {
  size_t operator()(const Key &k) const
  {
    return std::hash<const void *>()(k.data) ^ static_cast<size_t>(k.row_stride * 31 + k.format * 131 + k.target);
  }
};

struct Entry {
  int64_t version;                       /* of the tensor; -1: an inference tensor, which has none */
  std::shared_ptr<const esmm_weights> w; /* NULL for a bias */
  std::optional<Tensor> bias;            /* as fp32 */
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<Key, Entry, KeyHash> entries;
};
Table &table = *new Table;

/* at::_ops::_version::call, where torch has it under that name: every call asks for a version, and by name, through
   the stable ABI, that takes a sixth of a small product's time. */
int64_t (*quick_version)(AtenTensorHandle);

int64_t version_of(const Tensor &t)
{
  if (quick_version)
    return quick_version(t.get());
  std::array<StableIValue, 1> stack{from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_version", "", stack.data(), TORCH_ABI_VERSION));
  return to<int64_t>(stack[0]);
}

bool is_inference(const Tensor &t)
{
  std::array<StableIValue, 1> stack{from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_inference", "", stack.data(), TORCH_ABI_VERSION));
  return to<bool>(stack[0]);
}

/* What an exception in Python said: the stable ABI hands on that there was one, and no more. */
thread_local std::string prepare_error;

/* Asks Python, which returns an esmm_weights * that is ours from then on, or NULL for a bias; plus 1 where it may stay
   in the table. */
int64_t call_prepare(const Tensor &t, int64_t format, int64_t target)
{
  std::array<StableIValue, 3> stack{from(t), from(format), from(target)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("esmm::_prepare", "", stack.data(), TORCH_ABI_VERSION));
  const int64_t address = to<int64_t>(stack[0]);
  ESMM_OPS_EXPECT(address >= 0, "esmm: ", prepare_error);
  return address;
}

/* A bias as fp32. One that stays is not made here: see float_copy in _registry.py. */
Tensor float_bias(const Tensor &t, const std::optional<Tensor> &before, bool stays)
{
  if (before)
    return torch::stable::copy_(const_cast<Tensor &>(*before), t); /* where graphs look for it */
  if (!stays)
    return torch::stable::contiguous(torch::stable::to(t, ScalarType::Float));
  std::array<StableIValue, 1> stack{from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("esmm::_float_copy", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

Entry prepared(const Key &key, const Tensor &t)
{
  std::optional<Tensor> bias; /* of an older version */
  {
    std::shared_lock<std::shared_mutex> lock(table.mutex);
    const auto found = table.entries.find(key);
    if (found != table.entries.end()) {
      if (found->second.version < 0 || found->second.version == version_of(t))
        return found->second;
      bias = found->second.bias;
    }
  }
  Entry made = {};
  made.version = is_inference(t) ? -1 : version_of(t);
  const int64_t address = call_prepare(t, key.format, key.target);
  if (key.format == BIAS)
    made.bias = float_bias(t, bias, address & 1);
  else
    made.w.reset(reinterpret_cast<const esmm_weights *>(address & ~INT64_C(1)),
                 [](const esmm_weights *w) { esmm.weights_free(const_cast<esmm_weights *>(w)); });
  if (!(address & 1))
    return made;
  Entry before; /* freed after the lock is */
  std::unique_lock<std::shared_mutex> lock(table.mutex);
  Entry &place = table.entries[key];
  before = place;
  place = made;
  return made;
}

/* ---- tensors as the library sees them ---- */

/* Of the dtypes that are not accepted. */
const char *dtype_name(ScalarType t)
{
  switch (t) {
  case ScalarType::Double:
    return "float64";
  case ScalarType::Long:
    return "int64";
  case ScalarType::Int:
    return "int32";
  case ScalarType::Short:
    return "int16";
  case ScalarType::Char:
    return "int8";
  case ScalarType::Byte:
    return "uint8";
  case ScalarType::Bool:
    return "bool";
  default:
    return "of another dtype";
  }
}

int32_t dtype_code(ScalarType t, const char *what)
{
  switch (t) {
  case ScalarType::Float:
    return ESMM_F32;
  case ScalarType::BFloat16:
    return ESMM_BF16;
  case ScalarType::Half:
    return ESMM_F16;
  default:
    fail("esmm: ", what, " is ", dtype_name(t), ": it has to be float32, bfloat16 or float16");
  }
}

/* -1 for the CPU. */
int32_t device_of(const Tensor &t)
{
  return t.is_cuda() ? t.get_device_index() : -1;
}

void check_device(const Tensor &t, int32_t device, const char *what)
{
  const int32_t its = device_of(t);
  ESMM_OPS_EXPECT(its == device, "esmm: ", what, " is on ", its < 0 ? "the CPU" : "cuda:" + std::to_string(its),
                  ", and x is on ", device < 0 ? "the CPU" : "cuda:" + std::to_string(device));
}

esmm_matrix matrix_of(void *data, int64_t rows, int64_t cols, int64_t ld, int32_t dtype, int32_t device)
{
  esmm_matrix m = {};
  m.data = data;
  m.rows = rows;
  m.cols = cols;
  m.ld = ld;
  m.dtype = static_cast<esmm_dtype>(dtype);
  m.place = device >= 0 ? ESMM_DEVICE : ESMM_HOST;
  m.device = device > 0 ? device : 0;
  return m;
}

/* t [.., cols] as rows of `cols`; what does not lie like that is copied, and *t is the copy. */
esmm_matrix rows_of(Tensor *t, int32_t dtype, int32_t device)
{
  int64_t dims = t->dim(), cols = t->size(dims - 1);
  if (dims == 2 && t->stride(1) == 1 && (t->stride(0) >= cols || t->size(0) <= 1)) {
    const int64_t rows = t->size(0);
    return matrix_of(t->data_ptr(), rows, cols, rows > 1 ? t->stride(0) : cols, dtype, device);
  }
  if (!t->is_contiguous())
    *t = torch::stable::contiguous(*t);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < dims; i++)
    rows *= t->size(i);
  return matrix_of(t->data_ptr(), rows, cols, cols, dtype, device);
}

/* weight [out, in], turned [in, out], prepared in the dtype that x has. */
Entry weights_of(const Tensor &weight, int64_t in, int64_t format, int32_t target, int32_t device, const char *what)
{
  check_device(weight, device, what);
  ESMM_OPS_EXPECT(weight.dim() == 2, "esmm: ", what, " has ", weight.dim(), " dimensions and needs 2");
  const int64_t rows = weight.size(0), cols = weight.size(1);
  ESMM_OPS_EXPECT((format & TURNED ? rows : cols) == in, "esmm: x has rows of ", in, ", and ", what, " is [", rows,
                  ", ", cols, "]");
  const int32_t source = dtype_code(weight.scalar_type(), what);
  ESMM_OPS_EXPECT(source == target || source == ESMM_F32, "esmm: x and ", what,
                  " have different dtypes; only a float32 weight may be wider than x");
  const Key key = {weight.data_ptr(), rows, cols, weight.stride(0), weight.stride(1), format, source, target, device};
  return prepared(key, weight);
}

/* *kept holds what had to be made. */
const float *bias_of(const std::optional<Tensor> &bias, int64_t n, int32_t device, const char *what, Entry *kept)
{
  if (!bias)
    return nullptr;
  check_device(*bias, device, what);
  ESMM_OPS_EXPECT(bias->dim() == 1 && bias->size(0) == n, "esmm: ", what, " needs the shape [", n, "]");
  const int32_t source = dtype_code(bias->scalar_type(), what);
  if (source == ESMM_F32 && (n <= 1 || bias->stride(0) == 1))
    return static_cast<const float *>(bias->data_ptr());
  const Key key = {bias->data_ptr(), n, 1, bias->stride(0), 1, BIAS, source, ESMM_F32, device};
  *kept = prepared(key, *bias);
  return static_cast<const float *>(kept->bias->data_ptr());
}

Tensor new_rows(const Tensor &x, int64_t n, const int32_t dtype)
{
  const int64_t dims = x.dim();
  std::array<int64_t, 8> sizes, strides;
  ESMM_OPS_EXPECT(dims <= 8, "esmm: x has ", dims, " dimensions; 8 is the most");
  int64_t step = 1;
  for (int64_t i = dims - 1; i >= 0; i--) {
    sizes[i] = i == dims - 1 ? n : x.size(i);
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), dtype, type, index, &made));
  return Tensor(made);
}

int32_t torch_dtype(const Tensor &t)
{
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

/* ---- the operators ---- */

/* What the operators have in common; the entries keep weights alive for the length of the call. */
struct Call {
  esmm_matmul_opts opts = {};
  esmm_matrix residual = {};
  Entry gate = {}, biases[2] = {};
  Tensor kept; /* the residual, where it had to be copied */
  Tensor x;
  Tensor y;

  Call(const Tensor &x_, int64_t n, const Entry &weights, const std::optional<Tensor> &bias,
       const std::optional<Tensor> &residual_, const std::optional<Tensor> &gate_,
       const std::optional<Tensor> &gate_bias, int64_t activation, int64_t format, int32_t *nonzeros)
      : kept(x_), x(x_), y(new_rows(x_, n, torch_dtype(x_)))
  {
    const int32_t device = device_of(x), dtype = dtype_code(x.scalar_type(), "x");
    const int64_t in = x.size(x.dim() - 1);
    esmm_matrix a = rows_of(&x, dtype, device), c = matrix_of(y.data_ptr(), a.rows, n, n, dtype, device);
    opts.size = sizeof opts;
    opts.activation = static_cast<esmm_activation>(activation);
    opts.bias = bias_of(bias, n, device, "bias", &biases[0]);
    if (residual_) {
      kept = *residual_;
      check_device(kept, device, "residual");
      bool same = kept.dim() == y.dim();
      for (int64_t i = 0; same && i < y.dim(); i++)
        same = kept.size(i) == y.size(i);
      ESMM_OPS_EXPECT(same, "esmm: residual does not have the result's shape");
      residual = rows_of(&kept, dtype_code(kept.scalar_type(), "residual"), device);
      opts.residual = &residual;
    }
    if (gate_) {
      gate = weights_of(*gate_, in, format, dtype, device, "gate");
      opts.gate = gate.w.get();
      opts.gate_bias = bias_of(gate_bias, n, device, "gate_bias", &biases[1]);
    }
    ESMM_OPS_EXPECT(gate_ || !gate_bias, "esmm: gate_bias is given, and gate is not");
    opts.column_nonzeros = nonzeros;
    Context ctx(device);
    const esmm_status status = esmm.matmul(ctx.get(), &a, weights.w.get(), &c, &opts, nullptr);
    ESMM_OPS_EXPECT(status == ESMM_OK, "esmm: ", in_python(esmm.ctx_error(ctx.get())));
  }
};

Entry weights_for(const Tensor &x, const Tensor &weight, int64_t format)
{
  ESMM_OPS_EXPECT(x.dim() >= 1, "esmm: x has no dimensions");
  return weights_of(weight, x.size(x.dim() - 1), format, dtype_code(x.scalar_type(), "x"), device_of(x), "weight");
}

Tensor linear(const Tensor x, const Tensor weight, const std::optional<Tensor> bias,
              const std::optional<Tensor> residual, const std::optional<Tensor> gate,
              const std::optional<Tensor> gate_bias, int64_t activation, int64_t format)
{
  const Entry w = weights_for(x, weight, format);
  return Call(x, weight.size(0), w, bias, residual, gate, gate_bias, activation, format, nullptr).y;
}

/* The same with the arguments first that most calls have. */
Tensor linear_plain(const Tensor x, const Tensor weight, const std::optional<Tensor> bias, int64_t activation,
                    int64_t format, const std::optional<Tensor> residual, const std::optional<Tensor> gate,
                    const std::optional<Tensor> gate_bias)
{
  const Entry w = weights_for(x, weight, format);
  return Call(x, weight.size(0), w, bias, residual, gate, gate_bias, activation, format, nullptr).y;
}

/* x times weight [in, out] as it is: what a gradient is multiplied with. */
Tensor linear_turned(const Tensor x, const Tensor weight)
{
  const Entry w = weights_for(x, weight, TURNED);
  return Call(x, weight.size(1), w, std::nullopt, std::nullopt, std::nullopt, std::nullopt, 0, 0, nullptr).y;
}

std::tuple<Tensor, Tensor> linear_stats(const Tensor x, const Tensor weight, const std::optional<Tensor> bias,
                                        const std::optional<Tensor> residual, const std::optional<Tensor> gate,
                                        const std::optional<Tensor> gate_bias, int64_t activation, int64_t format)
{
  const Entry w = weights_for(x, weight, format);
  const int64_t n = weight.size(0);
  Tensor counts = torch::stable::new_empty(x, {n}, ScalarType::Int);
  auto *at = static_cast<int32_t *>(counts.data_ptr());
  Call call(x, n, w, bias, residual, gate, gate_bias, activation, format, at);
  return {call.y, counts};
}

Tensor linear_packed(const Tensor x, const Tensor packed, int64_t n, const std::optional<Tensor> bias,
                     const std::optional<Tensor> residual, int64_t activation)
{
  ESMM_OPS_EXPECT(x.dim() >= 1, "esmm: x has no dimensions");
  const int32_t device = device_of(x);
  check_device(packed, device, "packed");
  const int32_t dtype = dtype_code(x.scalar_type(), "x");
  const Key key = {packed.data_ptr(), packed.numel(), n, 1, 1, 0, -1, dtype, device};
  const Entry w = prepared(key, packed);
  return Call(x, n, w, bias, residual, std::nullopt, std::nullopt, activation, 0, nullptr).y;
}

} // namespace

/* Where libesmm is, and a function of Python's that tells a device's current stream. NULL, or what is wrong. */
extern "C" const char *esmm_torch_bind(const char *path, void *(*stream)(int32_t))
{
  ask_cuda_stream = stream;
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return dlerror();
#define FIND(name)                                                                  \
  esmm.name = reinterpret_cast<decltype(esmm.name)>(dlsym(library, "esmm_" #name)); \
  if (!esmm.name)                                                                   \
    return dlerror();
  FIND(ctx_create)
  FIND(ctx_free)
  FIND(ctx_error)
  FIND(ctx_set_stream)
  FIND(weights_free)
  FIND(matmul)
#undef FIND
  /* Only where torch has loaded them itself; a torch for CPUs has no libtorch_cuda. */
  if (void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD))
    quick_version = reinterpret_cast<decltype(quick_version)>(dlsym(torch, "_ZN2at4_ops8_version4callERKNS_6TensorE"));
  if (void *cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
    current_cuda_stream = reinterpret_cast<CudaStream>(dlsym(cuda, "aoti_torch_get_current_cuda_stream"));
  return nullptr;
}

/* Why esmm::_prepare is about to return -1, in the thread that called it. */
extern "C" void esmm_torch_failed(const char *text)
{
  prepare_error = text;
}

/* Drops what was prepared from a tensor at this address. */
extern "C" void esmm_torch_forget(const void *data)
{
  std::vector<Entry> dropped; /* freed after the lock is */
  std::unique_lock<std::shared_mutex> lock(table.mutex);
  for (auto at = table.entries.begin(); at != table.entries.end();)
    if (at->first.data == data) {
      dropped.push_back(at->second);
      at = table.entries.erase(at);
    } else
      ++at;
  lock.unlock();
}

#define OPERATORS(key)                                   \
  STABLE_TORCH_LIBRARY_IMPL(esmm, key, m)                \
  {                                                      \
    m.impl("linear", TORCH_BOX(&linear));                \
    m.impl("_linear", TORCH_BOX(&linear_plain));         \
    m.impl("_linear_turned", TORCH_BOX(&linear_turned)); \
    m.impl("linear_stats", TORCH_BOX(&linear_stats));    \
    m.impl("linear_packed", TORCH_BOX(&linear_packed));  \
  }
OPERATORS(CPU)
OPERATORS(CUDA)
