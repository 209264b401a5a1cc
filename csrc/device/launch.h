// Launches of kernels whose blocks have much shared memory, are clusters, or must all run at once.
#pragma once

#include <cuda_runtime.h>

#include "abi/shared_memory.h"
#include "plan/plan.h"

namespace normswap {
namespace {

inline dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

struct LaunchShape {
  dim3 grid;
  int threads, shared;  // dynamic shared memory, in bytes
  int cluster;          // blocks of a cluster; 1: no clusters
  bool overlap;         // with the kernel before: see follow_predecessor; sm_90 and newer
};

// A kernel must ask for more than 48 KB of shared memory once a device.
template <auto kernel>
cudaError_t allow_shared(int bytes) {
  constexpr int without_asking = 48 * 1024 - kStatisticsBytes;
  static AllowedShared allowed;
  return bytes <= without_asking ? cudaSuccess : ask_for_shared(reinterpret_cast<const void*>(kernel), bytes, allowed);
}

// Programmatic dependent launch: a kernel launched with `overlap` may start before the one before it on the stream has
// ended, from where all blocks of that have left or called let_successor_start. follow_predecessor waits for the end of
// all that came before; until then no memory may be touched but what was there when the last kernel without overlap
// started. A successor of another's making may rely on the kernels before its predecessor: call let_successor_start
// after the wait, unless the successor is known.
__device__ inline void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void follow_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <auto kernel, class Args>
cudaError_t launch_block(const Args& args, const LaunchShape& shape, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared<kernel>(shape.shared); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (shape.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// All blocks running at once.
template <auto kernel, class Args>
cudaError_t launch_at_once(Args args, const LaunchShape& shape, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared<kernel>(shape.shared); error != cudaSuccess) return error;
  void* arguments[] = {&args};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), shape.grid,
                                     dim3(shape.threads), arguments, shape.shared, stream);
}

}  // namespace
}  // namespace normswap
