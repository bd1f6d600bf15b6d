/*
 * ffi.cpp: esmm_matmul as XLA calls it, through its foreign function interface, on a CPU and on an NVIDIA GPU.
 *
 * esmm.jax builds this file at first use against the headers that jaxlib brings, and opens libesmm.so by its path, so
 * it is linked with neither. Two things differ from an ordinary caller's world:
 *
 * - XLA may run several calls at once, on threads of its own, and a context serves one thread at a time. So there is a
 *   pool of contexts: a call takes one of its device, or makes it, and puts it back. The last one put back is the first
 *   one taken, so a program that runs one call at a time stays with one context and what that remembers.
 * - A compiled program outlives Python's objects, and may come from a cache on a disk. So it does not hold a pointer to
 *   weights but a number, which is looked up in a table; a number that is no longer there is an error, not a crash.
 *   Dropping one waits for the calls that are inside.
 */
#include "xla/ffi/api/ffi.h"
#include "esmm.h"

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace ffi = xla::ffi;

namespace {

#define ESMM_JAX_FUNCTIONS(DO) \
  DO(esmm_ctx_create)          \
  DO(esmm_ctx_error)           \
  DO(esmm_ctx_set_stream)      \
  DO(esmm_prepare)             \
  DO(esmm_weights_free)        \
  DO(esmm_matmul)              \
  DO(esmm_status_str)

struct Library {
#define ESMM_JAX_FIELD(name) decltype(&::name) name = nullptr;
  ESMM_JAX_FUNCTIONS(ESMM_JAX_FIELD)
#undef ESMM_JAX_FIELD
} library;

struct Context {
  esmm_ctx *ctx;
  int device; /* -1: the CPU */
  int threads;
};

struct Entry {
  const esmm_weights *weights;
  int device;
};

/* Never destroyed: at exit the CUDA driver may be gone before this library is. */
struct State {
  std::mutex pool_lock;
  std::vector<Context> pool;
  std::shared_mutex table_lock;
  std::map<int64_t, Entry> table;
  int64_t last = 0;
};
State &state = *new State;

std::string device_name(int device)
{
  return device < 0 ? "cpu" : "cuda:" + std::to_string(device);
}

ffi::Error refuse(const std::string &text)
{
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "esmm.jax: " + text);
}

/* A context out of the pool, and back into it. */
class Lease {
public:
  Lease(int device, int threads) : held{nullptr, device, threads}
  {
    {
      std::lock_guard<std::mutex> guard(state.pool_lock);
      for (size_t i = state.pool.size(); i-- > 0 && !held.ctx;)
        if (state.pool[i].device == device && state.pool[i].threads == threads) {
          held = state.pool[i];
          state.pool.erase(state.pool.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    if (held.ctx)
      return;
    const std::string name = device_name(device);
    char text[512] = "";
    esmm_ctx_opts opts{};
    opts.size = sizeof opts;
    opts.device = name.c_str();
    opts.threads = threads;
    opts.error = text;
    opts.error_size = sizeof text;
    const esmm_status status = library.esmm_ctx_create(&held.ctx, &opts);
    if (status) {
      held.ctx = nullptr;
      error = *text ? text : library.esmm_status_str(status);
    }
  }
  ~Lease()
  {
    if (!held.ctx)
      return;
    std::lock_guard<std::mutex> guard(state.pool_lock);
    state.pool.push_back(held);
  }
  Lease(const Lease &) = delete;
  Lease &operator=(const Lease &) = delete;

  esmm_ctx *ctx() const { return held.ctx; }
  std::string error; /* why there is none */

private:
  Context held;
};

/* A buffer of two dimensions; turned: as the transposed matrix. */
bool matrix_of(const ffi::AnyBuffer &buffer, bool turned, int device, esmm_matrix *out)
{
  if (buffer.dimensions().size() != 2)
    return false;
  switch (buffer.element_type()) {
  case ffi::DataType::F32:
    out->dtype = ESMM_F32;
    break;
  case ffi::DataType::BF16:
    out->dtype = ESMM_BF16;
    break;
  case ffi::DataType::F16:
    out->dtype = ESMM_F16;
    break;
  default:
    return false;
  }
  const int64_t rows = buffer.dimensions()[0], cols = buffer.dimensions()[1];
  out->data = buffer.untyped_data();
  out->rows = turned ? cols : rows;
  out->cols = turned ? rows : cols;
  out->order = turned ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  out->place = device < 0 ? ESMM_HOST : ESMM_DEVICE;
  out->device = device < 0 ? 0 : device;
  return true;
}

/*
 * c = activation(a w + bias) + residual. w is the entry `weights` of the table, or, if that is 0, the next buffer after
 * a, which is then prepared in every call. After it come the bias [n], of fp32, and the residual, where there are any.
 */
ffi::Error product(int device, void *stream, const ffi::AnyBuffer &a, const ffi::RemainingArgs &rest, ffi::AnyBuffer c,
                   int64_t weights, bool transpose_a, bool transpose_b, int32_t activation, bool has_bias,
                   bool has_residual, int32_t threads)
{
  esmm_matrix am{}, bm{}, cm{}, rm{};
  size_t next = 0;
  if (rest.size() != static_cast<size_t>(!weights) + has_bias + has_residual)
    return refuse("a call with " + std::to_string(rest.size()) + " operands beside A");
  if (!matrix_of(a, transpose_a, device, &am) || !matrix_of(c, false, device, &cm))
    return refuse("A and C must be matrices of float32, bfloat16 or float16");
  if (!weights) {
    const auto b = rest.get<ffi::AnyBuffer>(next++);
    if (!b.has_value() || !matrix_of(*b, transpose_b, device, &bm))
      return refuse("B must be a matrix of float32, bfloat16 or float16");
  }
  esmm_matmul_opts opts{};
  opts.size = sizeof opts;
  opts.activation = static_cast<esmm_activation>(activation);
  if (has_bias) {
    const auto bias = rest.get<ffi::AnyBuffer>(next++);
    if (!bias.has_value() || bias->element_type() != ffi::DataType::F32 ||
        bias->element_count() != static_cast<size_t>(cm.cols))
      return refuse("the bias must be " + std::to_string(cm.cols) + " numbers of float32");
    opts.bias = bias->typed_data<float>();
  }
  if (has_residual) {
    const auto residual = rest.get<ffi::AnyBuffer>(next++);
    if (!residual.has_value() || !matrix_of(*residual, false, device, &rm))
      return refuse("the residual must be a matrix of float32, bfloat16 or float16");
    opts.residual = &rm;
  }

  std::shared_lock<std::shared_mutex> inside(state.table_lock, std::defer_lock);
  const esmm_weights *w = nullptr;
  if (weights) {
    inside.lock();
    const auto found = state.table.find(weights);
    if (found == state.table.end())
      return refuse("the weights of this program have been freed: keep them, or trace the function again");
    if (found->second.device != device)
      return refuse("the weights are on " + device_name(found->second.device) + " and this product runs on " +
                    device_name(device) + ": prepare them there");
    w = found->second.weights;
  }
  const Lease lease(device, threads);
  if (!lease.ctx())
    return refuse(lease.error);
  esmm_status status = library.esmm_ctx_set_stream(lease.ctx(), stream);
  esmm_weights *made = nullptr;
  if (!status && !weights) {
    esmm_prepare_opts prepare{};
    prepare.size = sizeof prepare;
    prepare.use = cm.rows <= 16 ? ESMM_USE_DECODE : ESMM_USE_LARGE_M;
    status = library.esmm_prepare(lease.ctx(), &bm, &prepare, &made);
    w = made;
  }
  if (!status)
    status = library.esmm_matmul(lease.ctx(), &am, w, &cm, &opts, nullptr);
  const char *text = status ? library.esmm_ctx_error(lease.ctx()) : "";
  const ffi::Error result = status ? refuse(*text ? text : library.esmm_status_str(status)) : ffi::Error::Success();
  library.esmm_weights_free(made);
  return result;
}

ffi::Error on_cpu(ffi::AnyBuffer a, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> c, int64_t weights,
                  bool transpose_a, bool transpose_b, int32_t activation, bool has_bias, bool has_residual,
                  int32_t threads)
{
  return product(-1, nullptr, a, rest, *c, weights, transpose_a, transpose_b, activation, has_bias, has_residual,
                 threads);
}

ffi::Error on_cuda(void *stream, int32_t device, ffi::AnyBuffer a, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> c, int64_t weights, bool transpose_a, bool transpose_b,
                   int32_t activation, bool has_bias, bool has_residual, int32_t threads)
{
  return product(device, stream, a, rest, *c, weights, transpose_a, transpose_b, activation, has_bias, has_residual,
                 threads);
}

} // namespace

#define ESMM_JAX_BIND(binding)     \
  (binding)                        \
      .Arg<ffi::AnyBuffer>()       \
      .RemainingArgs()             \
      .Ret<ffi::AnyBuffer>()       \
      .Attr<int64_t>("weights")    \
      .Attr<bool>("transpose_a")   \
      .Attr<bool>("transpose_b")   \
      .Attr<int32_t>("activation") \
      .Attr<bool>("has_bias")      \
      .Attr<bool>("has_residual")  \
      .Attr<int32_t>("threads")

#define ESMM_JAX_PUBLIC __attribute__((visibility("default")))

extern "C" {

ESMM_JAX_PUBLIC XLA_FFI_Error *esmm_jax_cpu(XLA_FFI_CallFrame *frame);
ESMM_JAX_PUBLIC XLA_FFI_Error *esmm_jax_cuda(XLA_FFI_CallFrame *frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(esmm_jax_cpu, on_cpu, ESMM_JAX_BIND(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    esmm_jax_cuda, on_cuda,
    ESMM_JAX_BIND(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void *>>().Ctx<ffi::DeviceOrdinal>()));

/* Opens libesmm.so; NULL, or what is wrong with it. */
ESMM_JAX_PUBLIC const char *esmm_jax_open(const char *path)
{
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return dlerror();
#define ESMM_JAX_FIND(name)                                                      \
  library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
  if (!library.name)                                                             \
    return dlerror();
  ESMM_JAX_FUNCTIONS(ESMM_JAX_FIND)
#undef ESMM_JAX_FIND
  return nullptr;
}

/* Enters weights in the table; device -1 is the CPU. Their number: 1 and up. */
ESMM_JAX_PUBLIC int64_t esmm_jax_put(const void *weights, int device)
{
  std::lock_guard<std::shared_mutex> guard(state.table_lock);
  state.table[++state.last] = {static_cast<const esmm_weights *>(weights), device};
  return state.last;
}

ESMM_JAX_PUBLIC void esmm_jax_drop(int64_t number)
{
  std::lock_guard<std::shared_mutex> guard(state.table_lock);
  state.table.erase(number);
}
}
