// What is known of a GPU.
#include <map>
#include <mutex>

#include "abi/tensors.h"

namespace normswap {

// Asked of the driver once a device.
Gpu gpu_of(int device) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  int driver = 0;
  STD_CUDA_CHECK(cudaDriverGetVersion(&driver));
  Gpu gpu{};
  gpu.clusters = major == 9 || major == 10;
  gpu.overlap = gpu.clusters && driver >= 12030;  // older ones cannot capture it in a graph
  gpu.shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  gpu.cooperative = attribute(cudaDevAttrCooperativeLaunch) != 0;
  return known[device] = gpu;
}

}  // namespace normswap
