/*
 * ops.cpp: the products as torch operators. In C++, because ten microseconds of Python a call matter to some callers.
 *
 * _ops.py declares the operators, and has what they mean to autograd, autocast and torch.compile; what they do is here
 * alone. _build.py compiles this file once and loads it. It is written in torch's stable ABI (2.10 and later), and
 * finds libesmm through the path that esmm_torch_bind is given: the file that Python has open already.
 *
 * Prepared weights are looked up by the tensor that they were made of: address, shape, strides, dtype, device, format
 * and version counter. Python knows which tensors last (_registry.py): esmm::_hold keeps one's memory from being given
 * away while its address is in the table, and esmm_torch_forget is called before that memory is let go of.
 *
 * Two rules shape the code. It uses the C functions of the stable ABI, not the C++ classes on top of them, which cost
 * an allocation for each tensor of each call. And no exception of this library leaves it: a process with torch in it
 * has parts of several C++ runtimes (libc10 and libcufile bring copies of their own), and one that was thrown here and
 * caught in torch has ended in a fault. Functions return false and leave a text; at the very end, in a frame that has
 * nothing to clean up, torch itself is asked to throw.
 */
#include "tensors.h"
#include "ways.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

/* ---- libesmm ---- */

struct Library {
  decltype(&esmm_ctx_create) ctx_create;
  decltype(&esmm_tune_save) tune_save;
  decltype(&esmm_ctx_free) ctx_free;
  decltype(&esmm_ctx_error) ctx_error;
  decltype(&esmm_ctx_set_stream) ctx_set_stream;
  decltype(&esmm_prepare) prepare;
  decltype(&esmm_weights_load) weights_load;
  decltype(&esmm_weights_get_info) weights_get_info;
  decltype(&esmm_weights_to_dense) weights_to_dense;
  decltype(&esmm_weights_free) weights_free;
  decltype(&esmm_matmul) matmul;
};
Library esmm;

using CudaStream = AOTITorchError (*)(int32_t, void **);
CudaStream current_cuda_stream;               /* torch's own; NULL where it has none */
void *(*ask_cuda_stream)(int32_t);            /* the same by way of Python */
void *(*torch_context)();                     /* at::globalContext, */
bool (*torch_is_deterministic)(const void *); /* whether torch.use_deterministic_algorithms is on; or NULL */

/* ---- contexts ---- */

/*
 * A context serves one thread at a time, so a call takes one and gives it back; so does Python (esmm_torch_take) for
 * what it calls of the library. The one given back last is taken first: a program with one thread has one context for
 * each device. They are never freed: at exit the CUDA driver may be gone before this library's destructors run.
 */
struct Idle {
  int64_t key; /* device, threads, and whether it is deterministic */
  esmm_ctx *ctx;
};

struct Contexts {
  std::atomic<Idle *> last{nullptr}; /* given back last: taken without a lock */
  std::mutex mutex;
  std::vector<Idle *> idle; /* the others; a few */
};
Contexts &contexts = *new Contexts;

void give_back_idle(Idle *taken)
{
  std::lock_guard<std::mutex> lock(contexts.mutex);
  contexts.idle.push_back(taken);
}

void give_back(Idle *taken)
{
  Idle *const before = contexts.last.exchange(taken, std::memory_order_acq_rel);
  if (before)
    give_back_idle(before);
}

class Context {
public:
  Context() = default;
  ~Context()
  {
    if (taken_)
      give_back(taken_);
  }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  esmm_ctx *get() const { return taken_->ctx; }
  Idle *release() { return std::exchange(taken_, nullptr); }

  /* device: -1 is the CPU. threads: 0 for as many as torch has. */
  bool open(int32_t device, uint32_t threads, Failure *failure)
  {
    static const bool named = std::getenv("ESMM_THREADS") != nullptr;
    if (device < 0 && !threads && !named)
      TORCH_DOES(torch_get_num_threads(&threads));
    const bool deterministic = torch_context && torch_is_deterministic && torch_is_deterministic(torch_context());
    const int64_t key = (static_cast<int64_t>(device) * 2 + deterministic) * 4096 + threads;
    taken_ = contexts.last.exchange(nullptr, std::memory_order_acq_rel);
    if (!taken_ || taken_->key != key)
      find(key);
    if (!taken_ && !create(device, static_cast<int>(threads), deterministic, key, failure))
      return false;
    return device < 0 || follow_stream(device, failure);
  }

private:
  /* Puts back what was taken in vain. */
  void find(int64_t key)
  {
    std::lock_guard<std::mutex> lock(contexts.mutex);
    if (taken_)
      contexts.idle.push_back(std::exchange(taken_, nullptr));
    for (size_t i = contexts.idle.size(); i-- > 0 && !taken_;)
      if (contexts.idle[i]->key == key) {
        taken_ = contexts.idle[i];
        contexts.idle.erase(contexts.idle.begin() + static_cast<std::ptrdiff_t>(i));
      }
  }
  bool create(int32_t device, int threads, bool deterministic, int64_t key, Failure *failure)
  {
    char text[512] = "", name[32] = "cpu";
    if (device >= 0)
      std::snprintf(name, sizeof name, "cuda:%d", device);
    auto made = std::make_unique<Idle>();
    made->key = key;
    esmm_ctx_opts opts = {};
    opts.size = sizeof opts;
    opts.device = name;
    opts.threads = threads;
    opts.deterministic = deterministic; /* 0: ESMM_DETERMINISTIC says */
    opts.error = text;
    opts.error_size = sizeof text;
    const esmm_status status = esmm.ctx_create(&made->ctx, &opts);
    EXPECT(status == ESMM_OK, "esmm: no context for %s: %s", name, text);
    taken_ = made.release();
    return true;
  }
  bool follow_stream(int32_t device, Failure *failure)
  {
    void *stream = nullptr;
    if (!current_cuda_stream || current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS)
      stream = ask_cuda_stream(device);
    EXPECT(esmm.ctx_set_stream(get(), stream) == ESMM_OK, "esmm: %s", esmm.ctx_error(get()));
    return true;
  }
  Idle *taken_ = nullptr;
};

/* ---- what was prepared ---- */

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
constexpr int32_t PACKED = -1;               /* as a source: the bytes of a weights file */
constexpr int64_t TURNED = INT64_C(1) << 40; /* in a format: B is the weight as it is */

struct KeyHash {
  size_t operator()(const Key &k) const
  {
    return std::hash<const void *>()(k.data) ^ static_cast<size_t>(k.row_stride * 31 + k.format * 131 + k.target);
  }
};

/* Weights, or a bias as fp32. */
struct Prepared {
  esmm_weights *w = nullptr;
  Owned bias;
  Races races;
  Prepared() = default;
  Prepared(const Prepared &) = delete;
  Prepared &operator=(const Prepared &) = delete;
  ~Prepared()
  {
    if (w)
      esmm.weights_free(w);
  }
};
using Kept = std::shared_ptr<Prepared>; /* alive for the length of a call, even if it is forgotten meanwhile */

struct Entry {
  int64_t version; /* of the tensor; -1: an inference tensor, which has none */
  Kept made;
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<Key, Entry, KeyHash> entries;
  int64_t forgotten = 0; /* how often something was dropped */
};
Table &table = *new Table;

bool version_of(AtenTensorHandle t, int64_t *version, Failure *failure)
{
  if (quick_version) {
    *version = quick_version(t);
    return true;
  }
  StableIValue stack[1];
  if (!again(t, &stack[0], failure) || !dispatch("aten::_version", stack, failure))
    return false;
  *version = to<int64_t>(stack[0]);
  return true;
}

bool is_inference(AtenTensorHandle t, bool *holds, Failure *failure)
{
  StableIValue stack[1];
  if (!again(t, &stack[0], failure) || !dispatch("aten::is_inference", stack, failure))
    return false;
  *holds = to<bool>(stack[0]);
  return true;
}

/* Asks Python to hold t's memory. *held: `forgotten` as it was when that was done: what is made of t may go into the
   table while it is the same. -1: t does not last. */
bool hold(AtenTensorHandle t, int64_t *held, Failure *failure)
{
  StableIValue stack[1];
  if (!again(t, &stack[0], failure) || !dispatch("esmm::_hold", stack, failure))
    return false;
  *held = to<int64_t>(stack[0]);
  return true;
}

/* A bias as fp32. One that stays is not made here: see float_copy in _registry.py. */
bool float_bias(const View &t, const Kept &before, bool stays, Owned *made, Failure *failure)
{
  StableIValue stack[1];
  if (before) { /* where graphs look for it */
    if (!again(before->bias.get(), &stack[0], failure))
      return false;
    *made = take(stack[0]);
    return copy_rows(t, codes.f32, made, failure);
  }
  if (!stays)
    return copy_rows(t, codes.f32, made, failure);
  if (!again(t.handle, &stack[0], failure) || !dispatch("esmm::_float_copy", stack, failure))
    return false;
  *made = take(stack[0]);
  return true;
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

/* What _formats.py coded. */
esmm_format format_of(int64_t code)
{
  const auto bits = [code](int from, int mask) { return static_cast<int>(code >> from) & mask; };
  esmm_format format = {};
  format.kind = static_cast<esmm_format_kind>(code & 255);
  if (format.kind == ESMM_FORMAT_BSR) {
    format.block_rows = bits(8, 4095);
    format.block_cols = bits(20, 4095);
  } else if (format.kind == ESMM_FORMAT_NM) {
    format.keep = bits(8, 255);
    format.group = bits(16, 255);
    format.group_cols = bits(24, 4095);
  }
  return format;
}

/* Of a weight [n, k], which is B's transpose, or, turned, B itself. */
bool prepare(const Key &key, const View &t, esmm_weights **w, Failure *failure)
{
  const int64_t rows = key.rows, cols = key.cols;
  void *data = t.data;
  Owned copy;
  bool by_rows = (key.col_stride == 1 || cols <= 1) && (key.row_stride >= cols || rows <= 1);
  const bool by_cols = (key.row_stride == 1 || rows <= 1) && (key.col_stride >= rows || cols <= 1);
  int64_t ld = by_rows ? (rows > 1 ? key.row_stride : cols) : (cols > 1 ? key.col_stride : rows);
  if (t.dtype != key.target || !(by_rows || by_cols)) {
    if (!copy_rows(t, torch_type(key.target), &copy, failure))
      return false;
    TORCH_DOES(aoti_torch_get_data_ptr(copy.get(), &data));
    by_rows = true;
    ld = cols;
  }
  const bool turned = key.format & TURNED;
  esmm_matrix b = matrix_of(data, turned ? rows : cols, turned ? cols : rows, ld, key.target, key.device);
  b.order = by_rows == turned ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
  esmm_prepare_opts opts = {};
  opts.size = sizeof opts;
  opts.format = format_of(key.format);
  Context ctx;
  if (!ctx.open(key.device, 0, failure))
    return false;
  return esmm.prepare(ctx.get(), &b, &opts, w) == ESMM_OK || fail_as_library(failure, esmm.ctx_error(ctx.get()));
}

/* A file in memory. */
class File {
public:
  File() : number_(memfd_create("esmm", MFD_CLOEXEC)) {}
  File(const File &) = delete;
  File &operator=(const File &) = delete;
  ~File()
  {
    if (number_ >= 0)
      close(number_);
  }
  bool write(const char *bytes, int64_t n, Failure *failure)
  {
    EXPECT(number_ >= 0, "esmm: no file in memory: %s", std::strerror(errno));
    while (n > 0) {
      const ssize_t done = ::write(number_, bytes, static_cast<size_t>(n));
      EXPECT(done > 0 || errno == EINTR, "esmm: a file in memory: %s", std::strerror(errno));
      bytes += std::max<ssize_t>(done, 0);
      n -= std::max<ssize_t>(done, 0);
    }
    return true;
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }

private:
  int number_;
};

/* Of the bytes of a weights file, which the library reads from files alone. */
bool load(const View &packed, int32_t target, esmm_ctx *ctx, esmm_weights **w, Failure *failure)
{
  static const char *const names[] = {"float32", "bfloat16", "float16"};
  View host = packed;
  host.place = codes.cpu;
  host.device = -1;
  Owned bytes;
  void *data = nullptr;
  int64_t n = 0;
  File file;
  if (!new_tensor(packed.sizes, packed.dims, packed.type, host, &bytes, failure) ||
      !copy_rows(packed, packed.type, &bytes, failure))
    return false;
  TORCH_DOES(aoti_torch_get_data_ptr(bytes.get(), &data));
  TORCH_DOES(aoti_torch_get_numel(bytes.get(), &n));
  if (!file.write(static_cast<const char *>(data), n, failure))
    return false;
  if (esmm.weights_load(ctx, file.path().c_str(), w) != ESMM_OK)
    return fail_as_library(failure, esmm.ctx_error(ctx));
  esmm_weights_info info = {};
  info.size = sizeof info;
  EXPECT(esmm.weights_get_info(*w, &info) == ESMM_OK, "esmm: the sparse tensor cannot be read");
  EXPECT(info.dtype == static_cast<esmm_dtype>(target), "esmm: the sparse tensor is %s, and x is %s", names[info.dtype],
         names[target]);
  return true;
}

bool make(const Key &key, const View &t, Prepared *made, Failure *failure)
{
  if (key.source != PACKED)
    return prepare(key, t, &made->w, failure);
  Context ctx;
  return ctx.open(key.device, 0, failure) && load(t, key.target, ctx.get(), &made->w, failure);
}

bool prepared(const Key &key, const View &t, Kept *found, Failure *failure)
{
  Kept bias; /* of an older version */
  {
    std::shared_lock<std::shared_mutex> lock(table.mutex);
    const auto at = table.entries.find(key);
    if (at != table.entries.end()) {
      int64_t version = -1;
      if (at->second.version >= 0 && !version_of(t.handle, &version, failure))
        return false;
      if (at->second.version == version) {
        *found = at->second.made;
        return true;
      }
      if (key.format == BIAS)
        bias = at->second.made;
    }
  }
  bool untracked = false;
  int64_t version = -1, held = -1;
  if (!is_inference(t.handle, &untracked, failure) || (!untracked && !version_of(t.handle, &version, failure)) ||
      !hold(t.handle, &held, failure))
    return false;
  Kept made = std::make_shared<Prepared>();
  if (!(key.format == BIAS ? float_bias(t, bias, held >= 0, &made->bias, failure) : make(key, t, made.get(), failure)))
    return false;
  *found = made;
  std::unique_lock<std::shared_mutex> lock(table.mutex);
  if (held != table.forgotten)
    return true;
  Entry &place = table.entries[key];
  place.version = version;
  std::swap(place.made, made); /* what was there is freed after the lock is */
  lock.unlock();
  return true;
}

/* ---- tensors as the library sees them ---- */

/* t [.., cols] as rows of `cols`; what does not lie like that is copied, and *copy is that. */
bool rows_of(const View &t, esmm_matrix *m, Owned *copy, Failure *failure)
{
  const int64_t cols = t.sizes[t.dims - 1];
  if (t.dims == 2 && t.strides[1] == 1 && (t.strides[0] >= cols || t.sizes[0] <= 1)) {
    const int64_t rows = t.sizes[0];
    *m = matrix_of(t.data, rows, cols, rows > 1 ? t.strides[0] : cols, t.dtype, t.device);
    return true;
  }
  void *data = t.data;
  if (!is_contiguous(t)) {
    if (!copy_rows(t, t.type, copy, failure))
      return false;
    TORCH_DOES(aoti_torch_get_data_ptr(copy->get(), &data));
  }
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dims; i++)
    rows *= t.sizes[i];
  *m = matrix_of(data, rows, cols, cols, t.dtype, t.device);
  return true;
}

/* weight [out, in], turned [in, out], prepared in the dtype that x has. *out: how many columns the result has. */
bool weights_of(AtenTensorHandle weight, const View &x, int64_t format, const char *what, Kept *found, int64_t *out,
                Failure *failure)
{
  View w;
  const int64_t in = x.sizes[x.dims - 1];
  if (!look(weight, &w, failure) || !check_device(w, x, what, failure))
    return false;
  EXPECT(w.dims == 2, "esmm: %s has %" PRId64 " dimensions and needs 2", what, w.dims);
  const int64_t rows = w.sizes[0], cols = w.sizes[1];
  EXPECT((format & TURNED ? rows : cols) == in, "esmm: x has rows of %" PRId64 ", and %s is [%" PRId64 ", %" PRId64 "]",
         in, what, rows, cols);
  if (!check_dtype(w, what, failure))
    return false;
  EXPECT(w.dtype == x.dtype || w.dtype == ESMM_F32,
         "esmm: x and %s have different dtypes; only a float32 weight may be wider than x", what);
  *out = format & TURNED ? cols : rows;
  const Key key = {w.data, rows, cols, w.strides[0], w.strides[1], format, w.dtype, x.dtype, w.device};
  return prepared(key, w, found, failure);
}

/* *kept holds what had to be made. */
bool bias_of(const Owned &bias, int64_t n, const View &x, const char *what, const float **data, Kept *kept,
             Failure *failure)
{
  if (!bias)
    return true;
  View b;
  if (!look(bias.get(), &b, failure) || !check_device(b, x, what, failure))
    return false;
  EXPECT(b.dims == 1 && b.sizes[0] == n, "esmm: %s needs the shape [%" PRId64 "]", what, n);
  if (!check_dtype(b, what, failure))
    return false;
  void *at = b.data;
  if (b.dtype != ESMM_F32 || (n > 1 && b.strides[0] != 1)) {
    const Key key = {b.data, n, 1, b.strides[0], 1, BIAS, b.dtype, ESMM_F32, b.device};
    if (!prepared(key, b, kept, failure))
      return false;
    TORCH_DOES(aoti_torch_get_data_ptr((*kept)->bias.get(), &at));
  }
  *data = static_cast<const float *>(at);
  return true;
}

/* ---- the operators ---- */

/* What an operator was called with. */
struct Arguments {
  Owned x, weight, bias, residual, gate, gate_bias;
  int64_t activation = 0, format = 0;
};

bool look_at_x(const Owned &x, View *v, Failure *failure)
{
  if (!look(x.get(), v, failure))
    return false;
  EXPECT(v->dims >= 1, "esmm: x has no dimensions");
  return check_dtype(*v, "x", failure);
}

/* y [.., n] = act(x W + bias) + residual, W being w; the other arguments are checked here. */
bool product(const Arguments &given, const View &x, const Prepared &w, int64_t n, int32_t *nonzeros, Owned *y,
             Failure *failure)
{
  esmm_matmul_opts opts = {};
  esmm_matrix a, c, residual;
  Kept gate, kept[2];
  Owned copies[2];
  std::array<int64_t, 8> sizes;
  EXPECT(x.dims <= 8, "esmm: x has %" PRId64 " dimensions; 8 is the most", x.dims);
  std::copy(x.sizes, x.sizes + x.dims, sizes.begin());
  sizes[static_cast<size_t>(x.dims - 1)] = n;
  void *data = nullptr;
  if (!rows_of(x, &a, &copies[0], failure) || !new_tensor(sizes.data(), x.dims, x.type, x, y, failure))
    return false;
  TORCH_DOES(aoti_torch_get_data_ptr(y->get(), &data));
  c = matrix_of(data, a.rows, n, n, x.dtype, x.device);
  opts.size = sizeof opts;
  opts.activation = static_cast<esmm_activation>(given.activation);
  opts.column_nonzeros = nonzeros;
  if (!bias_of(given.bias, n, x, "bias", &opts.bias, &kept[0], failure))
    return false;
  if (given.residual) {
    View r;
    if (!look(given.residual.get(), &r, failure) || !check_device(r, x, "residual", failure))
      return false;
    EXPECT(r.dims == x.dims && std::equal(r.sizes, r.sizes + r.dims, sizes.begin()),
           "esmm: residual does not have the result's shape");
    if (!check_dtype(r, "residual", failure) || !rows_of(r, &residual, &copies[1], failure))
      return false;
    opts.residual = &residual;
  }
  if (given.gate) {
    int64_t out = 0;
    if (!weights_of(given.gate.get(), x, given.format, "gate", &gate, &out, failure))
      return false;
    opts.gate = gate->w;
    if (!bias_of(given.gate_bias, n, x, "gate_bias", &opts.gate_bias, &kept[1], failure))
      return false;
  }
  EXPECT(given.gate || !given.gate_bias, "esmm: gate_bias is given, and gate is not");
  Context ctx;
  if (!ctx.open(x.device, 0, failure))
    return false;
  if (esmm.matmul(ctx.get(), &a, w.w, &c, &opts, nullptr) != ESMM_OK)
    return fail_as_library(failure, esmm.ctx_error(ctx.get()));
  return true;
}

/* ---- torch's own way ---- */

/* Can torch's linear do the same? Where B is kept in a format, or in another dtype than x has, it would do something
   else; where an argument is wrong, the library says so. */
bool torch_can(const Arguments &given, const View &x, int64_t n)
{
  static const bool asked = environment_asks();
  Failure ignored;
  View b;
  int32_t type = 0;
  if (asked || x.device >= 0 || x.dims > 8 || given.format != 0 || given.residual || given.gate || given.gate_bias ||
      !has_in_place(given.activation) ||
      (torch_context && torch_is_deterministic && torch_is_deterministic(torch_context())))
    return false;
  if (aoti_torch_get_dtype(given.weight.get(), &type) != AOTI_TORCH_SUCCESS || type != x.type)
    return false;
  return !given.bias || (look(given.bias.get(), &b, &ignored) && b.place == x.place && b.type == x.type &&
                         b.dims == 1 && b.sizes[0] == n);
}

/* By the way that is faster. What torch refuses, the library makes. */
bool faster_product(const Arguments &given, const View &x, Prepared &w, int64_t n, Owned *y, Failure *failure)
{
  if (!torch_can(given, x, n))
    return product(given, x, w, n, nullptr, y, failure);
  Race &race = w.races.of(rows_in(x));
  const Turn turn = race.begin();
  const double start = turn.timed ? seconds_now() : 0;
  const bool by_torch =
      turn.way == BY_TORCH && product_by_torch(given.x, given.weight, given.bias, given.activation, y, failure);
  if (!by_torch && !product(given, x, w, n, nullptr, y, failure))
    return false;
  if (turn.timed && by_torch == (turn.way == BY_TORCH))
    race.end(turn, seconds_now() - start);
  return true;
}

bool linear_of(const Arguments &given, StableIValue *result, Failure *failure)
{
  View x;
  Kept w;
  Owned y;
  int64_t n = 0;
  if (!look_at_x(given.x, &x, failure) || !weights_of(given.weight.get(), x, given.format, "weight", &w, &n, failure) ||
      !faster_product(given, x, *w, n, &y, failure))
    return false;
  *result = boxed_value(y.release());
  return true;
}

Arguments take_linear(const StableIValue *stack)
{
  Arguments given;
  given.x = take(stack[0]);
  given.weight = take(stack[1]);
  given.bias = take_optional(stack[2]);
  given.residual = take_optional(stack[3]);
  given.gate = take_optional(stack[4]);
  given.gate_bias = take_optional(stack[5]);
  given.activation = to<int64_t>(stack[6]);
  given.format = to<int64_t>(stack[7]);
  return given;
}

bool linear(StableIValue *stack, Failure *failure)
{
  return linear_of(take_linear(stack), stack, failure);
}

/* The same with the arguments first that most calls have. */
bool linear_ordered(StableIValue *stack, Failure *failure)
{
  Arguments given;
  given.x = take(stack[0]);
  given.weight = take(stack[1]);
  given.bias = take_optional(stack[2]);
  given.activation = to<int64_t>(stack[3]);
  given.format = to<int64_t>(stack[4]);
  given.residual = take_optional(stack[5]);
  given.gate = take_optional(stack[6]);
  given.gate_bias = take_optional(stack[7]);
  return linear_of(given, stack, failure);
}

/* And with those alone. */
bool linear_plain(StableIValue *stack, Failure *failure)
{
  Arguments given;
  given.x = take(stack[0]);
  given.weight = take(stack[1]);
  given.bias = take_optional(stack[2]);
  given.activation = to<int64_t>(stack[3]);
  return linear_of(given, stack, failure);
}

/* x times weight [in, out] as it is: what a gradient is multiplied with. */
bool linear_turned(StableIValue *stack, Failure *failure)
{
  Arguments given;
  given.x = take(stack[0]);
  given.weight = take(stack[1]);
  given.format = TURNED;
  return linear_of(given, stack, failure);
}

bool linear_stats(StableIValue *stack, Failure *failure)
{
  const Arguments given = take_linear(stack);
  View x;
  Kept w;
  Owned y, counts;
  int64_t n = 0;
  void *at = nullptr;
  if (!look_at_x(given.x, &x, failure) || !weights_of(given.weight.get(), x, given.format, "weight", &w, &n, failure) ||
      !new_tensor(&n, 1, codes.i32, x, &counts, failure))
    return false;
  TORCH_DOES(aoti_torch_get_data_ptr(counts.get(), &at));
  if (!product(given, x, *w, n, static_cast<int32_t *>(at), &y, failure))
    return false;
  stack[0] = boxed_value(y.release());
  stack[1] = boxed_value(counts.release());
  return true;
}

bool linear_packed(StableIValue *stack, Failure *failure)
{
  Arguments given;
  given.x = take(stack[0]);
  given.weight = take(stack[1]);
  const int64_t n = to<int64_t>(stack[2]);
  given.bias = take_optional(stack[3]);
  given.residual = take_optional(stack[4]);
  given.activation = to<int64_t>(stack[5]);
  View x, packed;
  Kept w;
  Owned y;
  int64_t bytes = 0;
  if (!look_at_x(given.x, &x, failure) || !look(given.weight.get(), &packed, failure) ||
      !check_device(packed, x, "packed", failure))
    return false;
  TORCH_DOES(aoti_torch_get_numel(given.weight.get(), &bytes));
  const Key key = {packed.data, bytes, n, 1, 1, 0, PACKED, x.dtype, x.device};
  if (!prepared(key, packed, &w, failure) || !product(given, x, *w, n, nullptr, &y, failure))
    return false;
  stack[0] = boxed_value(y.release());
  return true;
}

/* The same bytes as a matrix [out, k]. */
bool unpack(StableIValue *stack, Failure *failure)
{
  const Owned packed = take(stack[0]);
  const int64_t sizes[] = {to<int64_t>(stack[1]), to<int64_t>(stack[2])};
  const auto type = to<int32_t>(stack[3]);
  View p;
  Prepared made;
  Owned dense;
  Context ctx;
  void *data = nullptr;
  if (!look(packed.get(), &p, failure))
    return false;
  const int32_t dtype = library_dtype(type);
  EXPECT(dtype >= 0, "esmm: a sparse tensor is never %s", dtype_name(type));
  if (!new_tensor(sizes, 2, type, p, &dense, failure) || !ctx.open(p.device, 0, failure) ||
      !load(p, dtype, ctx.get(), &made.w, failure))
    return false;
  TORCH_DOES(aoti_torch_get_data_ptr(dense.get(), &data));
  esmm_matrix b = matrix_of(data, sizes[1], sizes[0], sizes[1], dtype, p.device);
  b.order = ESMM_COL_MAJOR;
  if (esmm.weights_to_dense(ctx.get(), made.w, &b) != ESMM_OK)
    return fail_as_library(failure, esmm.ctx_error(ctx.get()));
  stack[0] = boxed_value(dense.release());
  return true;
}

/* ---- the way in and out ---- */

using Kernel = bool (*)(StableIValue *, Failure *);

/* Nothing is thrown across this frame's border: memory may run out, and torch's functions may throw. */
template <typename Work> __attribute__((noinline)) bool contained(const Work &work, Failure *failure) noexcept
{
  try {
    return work();
  } catch (const std::exception &e) {
    return fail(failure, "esmm: %s", e.what());
  } catch (...) {
    return fail(failure, "esmm: an exception without a text");
  }
}

template <Kernel kernel> void boxed(StableIValue *stack, uint64_t, uint64_t)
{
  Failure failure;
  if (contained([&] { return kernel(stack, &failure); }, &failure))
    return;
  if (check_fail)
    check_fail("esmm", "esmm", 0, failure.text);
  throw std::runtime_error(failure.text);
}

template <typename Function> void find(const char *library, const char *name, Function *function)
{
  /* Only where torch has loaded it itself; a torch for CPUs has no libtorch_cuda. */
  if (void *const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD))
    *function = reinterpret_cast<Function>(dlsym(handle, name));
}

} // namespace

/* Where libesmm is, and a function of Python's that returns a device's current stream. known: this torch is one whose
   C++ types are those that quick ways past the stable ABI take; a later one may have others. NULL, or what is wrong. */
extern "C" const char *esmm_torch_bind(const char *path, void *(*stream)(int32_t), int known)
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
  FIND(prepare)
  FIND(weights_load)
  FIND(weights_get_info)
  FIND(weights_to_dense)
  FIND(weights_free)
  FIND(matmul)
  FIND(tune_save)
#undef FIND
  codes = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),  aoti_torch_dtype_float16(),
           aoti_torch_dtype_int32(),   aoti_torch_device_type_cpu(), aoti_torch_device_type_cuda()};
  find("libc10.so", "_ZN3c106detail14torchCheckFailEPKcS2_jS2_", &check_fail);
  find("libtorch_cpu.so", "torch_exception_get_what_without_backtrace", &torch_error);
  find("libtorch_cpu.so", "_ZN2at13globalContextEv", &torch_context);
  find("libtorch_cpu.so", "_ZNK2at7Context23deterministicAlgorithmsEv", &torch_is_deterministic);
  find("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream", &current_cuda_stream);
  if (!known)
    return nullptr;
  find("libtorch_cpu.so", "_ZNK2at10TensorBase8_versionEv", &quick_version);
  find("libtorch_cuda.so",
       "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE",
       &empty_cuda);
  return nullptr;
}

/* A context for the calling thread alone, until it is given back; threads: 0 for as many as torch has. NULL, and why in
 *failure, whose 1024 bytes are Python's. */
extern "C" void *esmm_torch_take(int32_t device, uint32_t threads, esmm_ctx **ctx, Failure *failure)
{
  static_assert(sizeof(Failure) == 1024, "as _registry.py has it");
  Idle *taken = nullptr;
  const auto work = [&] {
    Context made;
    if (!made.open(device, threads, failure))
      return false;
    *ctx = made.get();
    taken = made.release();
    return true;
  };
  return contained(work, failure) ? taken : nullptr;
}

extern "C" void esmm_torch_give(void *taken)
{
  give_back(static_cast<Idle *>(taken));
}

/* Saves what the contexts in the pool have learnt, for the next process. A forked child leaves that to its parent. */
static const pid_t loaded_by = getpid();
extern "C" void esmm_torch_save()
{
  if (getpid() != loaded_by)
    return;
  if (Idle *const last = contexts.last.exchange(nullptr, std::memory_order_acq_rel))
    give_back_idle(last);
  std::vector<Idle *> saved; /* taken out meanwhile, so that no thread waits for the disk */
  {
    std::lock_guard<std::mutex> lock(contexts.mutex);
    saved.swap(contexts.idle);
  }
  for (Idle *idle : saved) {
    esmm.tune_save(idle->ctx);
    give_back_idle(idle);
  }
}

/* How often something was forgotten. */
extern "C" int64_t esmm_torch_forgotten()
{
  std::shared_lock<std::shared_mutex> lock(table.mutex);
  return table.forgotten;
}

/* Drops what was prepared from a tensor at this address. */
extern "C" void esmm_torch_forget(const void *data)
{
  std::vector<Entry> dropped; /* freed after the lock is */
  std::unique_lock<std::shared_mutex> lock(table.mutex);
  table.forgotten++;
  for (auto at = table.entries.begin(); at != table.entries.end();)
    if (at->first.data == data) {
      dropped.push_back(at->second);
      at = table.entries.erase(at);
    } else
      ++at;
  lock.unlock();
}

#define OPERATORS(key)                               \
  STABLE_TORCH_LIBRARY_IMPL(esmm, key, m)            \
  {                                                  \
    m.impl("linear", &boxed<linear>);                \
    m.impl("_linear", &boxed<linear_ordered>);       \
    m.impl("_linear_plain", &boxed<linear_plain>);   \
    m.impl("_linear_turned", &boxed<linear_turned>); \
    m.impl("linear_stats", &boxed<linear_stats>);    \
    m.impl("linear_packed", &boxed<linear_packed>);  \
    m.impl("unpack", &boxed<unpack>);                \
  }
OPERATORS(CPU)
OPERATORS(CUDA)
