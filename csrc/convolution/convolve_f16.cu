// Convolutions of channels_last images of float16.
#include "convolution/convolve_tiles.cuh"

namespace normswap {

cudaError_t convolve_f16(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  return launch_form<Half>(c, gpu, stream);
}

}  // namespace normswap
