/*
 * module.c: embedded fatbins, their functions, launches, tensor maps.
 *
 * A module is loaded the first time one of its functions is wanted on a device, and stays while the device is used.
 */
#include "cuda/device/device.h"

#include <string.h>

ESMM_FATBIN(probe);

/* Set by scripts/fatbins.sh: the toolkit's version (13000 for CUDA 13.0), 0 where there was none. */
extern const uint32_t esmm_fatbin_toolkit;

static const esmm_cuda_function probe = {&fatbin_probe, "esmm_probe", 0};

static inline const esmm_cuda_driver *cu(void)
{
  return esmm_cuda_driver_get();
}

bool esmm_cuda_has_kernels(void)
{
  return esmm_fatbin_toolkit != 0;
}

/* ---- modules and functions; the device's lock is held, its primary context current ---- */

static bool is_mismatch(CUresult result)
{
  return result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
         result == CUDA_ERROR_INVALID_PTX || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION ||
         result == CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
}

/* A failed call of this section. esmm_cuda_check would take the lock to remember a lost device; callers pass it this
   after the unlock. */
typedef struct outcome {
  CUresult result;
  const char *call;
} outcome;

static outcome find_module(esmm_cuda_device *d, const esmm_fatbin *fatbin, CUmodule *module)
{
  for (int i = 0; i < d->module_count; i++)
    if (d->modules[i].image == fatbin->image) {
      *module = d->modules[i].module;
      return (outcome){CUDA_SUCCESS, ""};
    }
  if (d->module_count == MAX_MODULES)
    return (outcome){CUDA_ERROR_OUT_OF_MEMORY, "the table of modules"};
  const CUresult result = cu()->cuModuleLoadData(module, fatbin->image);
  if (result == CUDA_SUCCESS) {
    d->modules[d->module_count].image = fatbin->image;
    d->modules[d->module_count].module = *module;
    d->module_count++;
  }
  return (outcome){result, "cuModuleLoadData"};
}

static outcome load_function(esmm_cuda_device *d, const esmm_cuda_function *f, CUfunction *out)
{
  CUmodule module = NULL;
  outcome o = find_module(d, f->fatbin, &module);
  if (o.result == CUDA_SUCCESS)
    o = (outcome){cu()->cuModuleGetFunction(out, module, f->name), "cuModuleGetFunction"};
  if (o.result == CUDA_SUCCESS && f->shared > 0) /* 48 KiB, less what is static, without asking */
    o = (outcome){cu()->cuFuncSetAttribute(*out, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)f->shared),
                  "cuFuncSetAttribute"};
  return o;
}

/* The slot of a function, or a free one for it; FUNCTION_SLOTS where all are taken. Needs no lock. */
static size_t find_slot(esmm_cuda_device *d, const esmm_cuda_function *f, bool *found)
{
  size_t slot = ((uintptr_t)f >> 3) % FUNCTION_SLOTS;
  for (int tries = 0; tries < FUNCTION_SLOTS; tries++, slot = (slot + 1) % FUNCTION_SLOTS) {
    const esmm_cuda_function *key = atomic_load_explicit(&d->functions[slot].key, memory_order_acquire);
    *found = key == f;
    if (!key || *found)
      return slot;
  }
  return FUNCTION_SLOTS;
}

static outcome find_function(esmm_cuda_device *d, const esmm_cuda_function *f, CUfunction *out)
{
  bool found = false;
  const size_t slot = find_slot(d, f, &found);
  if (slot == FUNCTION_SLOTS)
    return (outcome){CUDA_ERROR_OUT_OF_MEMORY, "the table of functions"};
  outcome o = {CUDA_SUCCESS, ""};
  if (!found) {
    o = load_function(d, f, &d->functions[slot].function);
    if (o.result == CUDA_SUCCESS)
      atomic_store_explicit(&d->functions[slot].key, f, memory_order_release);
  }
  *out = d->functions[slot].function;
  return o;
}

static esmm_status check_function(esmm_ctx *ctx, const esmm_cuda_function *f, outcome o)
{
  const uint32_t toolkit = esmm_fatbin_toolkit;
  if (o.result == CUDA_SUCCESS)
    return ESMM_OK;
  if (is_mismatch(o.result) && cu()->version < (int)toolkit)
    return esmm_fail(
        ctx, ESMM_ERR_DRIVER,
        "%s of %s: %s: the kernels were built with CUDA %u.%u and the driver is for %d.%d; install a newer "
        "driver, or build with an older toolkit",
        o.call, f->fatbin->name, esmm_cuda_result_name(o.result), toolkit / 1000, toolkit % 1000 / 10,
        cu()->version / 1000, cu()->version % 1000 / 10);
  return esmm_cuda_check(ctx, o.result, "%s of %s in %s", o.call, f->name, f->fatbin->name);
}

esmm_status esmm_cuda_probe(esmm_ctx *ctx, esmm_cuda_device *device)
{
  CUfunction function = NULL;
  return check_function(ctx, &probe, find_function(device, &probe, &function));
}

void esmm_cuda_unload(esmm_cuda_device *device)
{
  for (int i = 0; i < device->module_count; i++)
    (void)cu()->cuModuleUnload(device->modules[i].module);
  device->module_count = 0;
  for (int i = 0; i < FUNCTION_SLOTS; i++)
    atomic_store_explicit(&device->functions[i].key, NULL, memory_order_relaxed);
}

static esmm_status get_function(esmm_ctx *ctx, const esmm_cuda_function *f, CUfunction *out)
{
  esmm_cuda_device *device = esmm_cuda_state(ctx)->device;
  bool found = false;
  const size_t slot = find_slot(device, f, &found);
  if (found) {
    *out = device->functions[slot].function;
    return ESMM_OK;
  }
  (void)pthread_mutex_lock(&device->lock);
  const outcome o = find_function(device, f, out);
  (void)pthread_mutex_unlock(&device->lock);
  return check_function(ctx, f, o);
}

/* ---- launches ---- */

static unsigned or_one(unsigned x)
{
  return x ? x : 1;
}

/*
 * A cooperative launch fails where not all of its blocks can be resident at once; without the attribute such blocks
 * wait for ones that never start. Under Nsight Compute, launches that are in clusters as well end with an illegal
 * instruction, so ESMM_COOPERATIVE=0 leaves the attribute out of those. They have a block a multiprocessor at most, all
 * of which are resident where nothing else runs on the GPU. Launches without clusters keep it: cooperative_groups needs
 * it.
 */
static esmm_status launch_current(esmm_ctx *ctx, const esmm_cuda_function *f, const esmm_launch *launch,
                                  CUstream stream, const void *params)
{
  CUfunction function = NULL;
  esmm_status status = get_function(ctx, f, &function);
  if (status != ESMM_OK)
    return status;
  CUlaunchAttribute attributes[2];
  unsigned count = 0;
  if (launch->cooperative && !(launch->cluster && esmm_cuda_state(ctx)->uncooperative))
    attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
  if (launch->cluster)
    attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                              .value.cluster = {.x = launch->cluster, .y = 1, .z = 1}};
  const CUlaunchConfig config = {.gridDimX = or_one(launch->grid_x),
                                 .gridDimY = or_one(launch->grid_y),
                                 .gridDimZ = or_one(launch->grid_z),
                                 .blockDimX = or_one(launch->threads),
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .sharedMemBytes = launch->shared,
                                 .hStream = stream,
                                 .attrs = attributes,
                                 .numAttrs = count};
  void *arguments[] = {(void *)params};
  return esmm_cuda_check(ctx, cu()->cuLaunchKernelEx(&config, function, arguments, NULL),
                         "cuLaunchKernelEx of %s (%u x %u x %u blocks of %u threads, %u bytes)", f->name,
                         config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.sharedMemBytes);
}

esmm_status esmm_cuda_launch(esmm_ctx *ctx, const esmm_cuda_function *function, const esmm_launch *launch,
                             CUstream stream, const void *params)
{
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = launch_current(ctx, function, launch, stream, params);
  esmm_cuda_leave(scope);
  return status;
}

esmm_status esmm_cuda_occupancy(esmm_ctx *ctx, const esmm_cuda_function *function, unsigned threads, unsigned shared,
                                int *blocks)
{
  *blocks = 0;
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  CUfunction handle = NULL;
  status = get_function(ctx, function, &handle);
  if (status == ESMM_OK)
    status =
        esmm_cuda_check(ctx, cu()->cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, (int)threads, shared),
                        "cuOccupancyMaxActiveBlocksPerMultiprocessor of %s", function->name);
  esmm_cuda_leave(scope);
  return status;
}

/* Swizzled as wide as a box is: 64 or 128 bytes. */
static esmm_status encode(esmm_ctx *ctx, int type, size_t element, CUdeviceptr data, int64_t inner, int64_t outer,
                          int64_t ld, unsigned box_inner, unsigned box_outer, esmm_tensor_map *out)
{
  _Static_assert(sizeof(esmm_tensor_map) == 128, "as in cuda.h");
  const uint64_t dims[2] = {(uint64_t)inner, (uint64_t)outer}, strides[1] = {(uint64_t)ld * element};
  const uint32_t box[2] = {box_inner, box_outer}, element_strides[2] = {1, 1};
  const bool narrow = box_inner * element == 64;
  const int swizzle = narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  const int promotion = narrow ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  void *address = NULL;
  memcpy(&address, &data, sizeof address);
  return esmm_cuda_check(ctx,
                         cu()->cuTensorMapEncodeTiled(out, type, 2, address, dims, strides, box, element_strides, 0,
                                                      swizzle, promotion, 0),
                         "cuTensorMapEncodeTiled of %lld x %lld, ld %lld, box %u x %u", (long long)outer,
                         (long long)inner, (long long)ld, box_outer, box_inner);
}

esmm_status esmm_cuda_tensor_map(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                 unsigned box_inner, unsigned box_outer, esmm_tensor_map *out)
{
  return encode(ctx, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, sizeof(float), data, inner, outer, ld, box_inner, box_outer, out);
}

esmm_status esmm_cuda_tensor_map_boxes_16(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                          unsigned box_inner, unsigned box_outer, esmm_tensor_map *out)
{
  return encode(ctx, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, data, inner, outer, ld, box_inner, box_outer, out);
}

esmm_status esmm_cuda_tensor_map_16(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                    esmm_tensor_map *out)
{
  return esmm_cuda_tensor_map_boxes_16(ctx, data, inner, outer, ld, ESMM_WGMMA16_BOX, ESMM_WGMMA16_BOX, out);
}
