// Convolutions of channels_last images of bfloat16.
#include "convolution/convolve_tiles.cuh"

namespace normswap {

cudaError_t convolve_bf16(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  return launch_form<BFloat16>(c, gpu, stream);
}

}  // namespace normswap
