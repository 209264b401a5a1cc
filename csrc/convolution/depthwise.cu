// Depthwise convolutions of channels_last images, with scale, shift, residual and activation, in one pass: a thread has
// eight channels of a few pixels beside each other, whose float32 sums run over the taps in order.
#include <algorithm>

#include "convolution/channel_values.cuh"
#include "device/activation.cuh"
#include "device/launch.h"

namespace normswap {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kVectors = 8;    // of eight channels, of a block, at most
constexpr int kStrips = 4;     // of pixels beside each other in a block, at most
constexpr int kRounds = 8;     // blocks a multiprocessor, at most, of which two run at once

// How the output is cut: `vectors` of channels by `across` strips of pixels by `down` rows a block; rows are those of all
// images.
struct Patches {
  int vectors, across, down;
  int chunks;                   // blocks for all channels
  int patches_across, patches;  // for a row, for all
};

struct DepthwiseArgs {
  Convolve c;
  Patches p;
};

template <int Stride>
constexpr int kAlong = Stride == 1 ? 4 : 2;  // pixels of a strip

// Adds the products of a strip's eight channels, from pixel (row, left) of the output on, to `sums`.
template <class T, int Kernel, int Stride>
__device__ inline void add_taps(const Convolve& c, int row, int left, int channel, const float (*weights)[8 * kVectors],
                                int at, float (&sums)[kAlong<Stride>][8]) {
  constexpr int Along = kAlong<Stride>, Columns = (Along - 1) * Stride + Kernel;
  const int image = row / c.out_height;
  const int y = row % c.out_height * Stride - c.padding[0], x = left * Stride - c.padding[1];
#pragma unroll 1
  for (int down = 0; down < Kernel; ++down) {
    if (static_cast<unsigned>(y + down) >= static_cast<unsigned>(c.height)) continue;
    const int64_t line = (static_cast<int64_t>(image) * c.height + y + down) * c.width;
    const T* pixels = static_cast<const T*>(c.input) + line * c.channels + channel;
    float taps[Kernel][8];
#pragma unroll
    for (int i = 0; i < Kernel; ++i) {
      const float4* tap = reinterpret_cast<const float4*>(&weights[down * Kernel + i][at]);
      const float4 low = tap[0], high = tap[1];
      taps[i][0] = low.x, taps[i][1] = low.y, taps[i][2] = low.z, taps[i][3] = low.w;
      taps[i][4] = high.x, taps[i][5] = high.y, taps[i][6] = high.z, taps[i][7] = high.w;
    }
    uint4 words[Columns];
#pragma unroll
    for (int column = 0; column < Columns; ++column) {
      words[column] = {0, 0, 0, 0};
      const bool inside = static_cast<unsigned>(x + column) < static_cast<unsigned>(c.width);
      load_if(inside, words[column], pixels + static_cast<int64_t>(x + column) * c.channels);
    }
#pragma unroll
    for (int column = 0; column < Columns; ++column) {
      float values[8];
      floats_of<T>(words[column], values);
#pragma unroll
      for (int i = 0; i < Along; ++i) {
        const int right = column - i * Stride;
        if (right < 0 || right >= Kernel) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(values[j], taps[right][j], sums[i][j]);
      }
    }
  }
}

template <class T, int Kernel, int Stride>
__global__ void __launch_bounds__(kThreads, 2) convolve_depthwise(const DepthwiseArgs args) {
  constexpr int Along = kAlong<Stride>, Taps = Kernel * Kernel;
  __shared__ __align__(16) float weights[Taps][8 * kVectors], scales[8 * kVectors], shifts[8 * kVectors];
  const Convolve& c = args.c;
  const Patches& p = args.p;
  const int chunk = static_cast<int>(blockIdx.x) % p.chunks;
  const int first_channel = 8 * p.vectors * chunk, mine = min(8 * p.vectors, c.channels - first_channel);
  for (int i = threadIdx.x; i < mine * Taps; i += static_cast<int>(blockDim.x)) {
    const T* all = static_cast<const T*>(c.conv_weight) + static_cast<int64_t>(first_channel) * Taps;
    weights[i / mine][i % mine] = to_float(all[i % mine * Taps + i / mine]);
  }
  for (int i = threadIdx.x; i < mine; i += static_cast<int>(blockDim.x)) {
    const float2 by = scale_and_shift([&](Value which) { return value_of(c, which, first_channel + i); }, c.eps);
    scales[i] = by.x;
    shifts[i] = by.y;
  }
  __syncthreads();

  const int at = 8 * (static_cast<int>(threadIdx.x) % p.vectors), strip = static_cast<int>(threadIdx.x) / p.vectors;
  if (at >= mine) return;
  const int step = static_cast<int>(gridDim.x) / p.chunks;
  for (int patch = static_cast<int>(blockIdx.x) / p.chunks; patch < p.patches; patch += step) {
    const int row = patch / p.patches_across * p.down + strip / p.across;
    const int left = (patch % p.patches_across * p.across + strip % p.across) * Along;
    if (row >= c.batch * c.out_height || left >= c.out_width) continue;
    float sums[Along][8] = {};
    add_taps<T, Kernel, Stride>(c, row, left, first_channel + at, weights, at, sums);
#pragma unroll
    for (int i = 0; i < Along; ++i) {
      if (left + i >= c.out_width) continue;
      const int64_t element = (static_cast<int64_t>(row) * c.out_width + left + i) * c.channels + first_channel + at;
      float out[8], added[8] = {};
      if (c.residual != nullptr) {
        floats_of<T>(*reinterpret_cast<const uint4*>(static_cast<const T*>(c.residual) + element), added);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out[j] = fmaf(sums[i][j], scales[at + j], shifts[at + j]);
        if (c.residual != nullptr) out[j] += added[j];
      }
      activated(Pack<T, 8>::of(out), c.activation).store(static_cast<T*>(c.out) + element);
    }
  }
}

int parts_of(int whole, int part) { return (whole + part - 1) / part; }

template <int Stride>
Patches patches_of(const Convolve& c, int multiprocessors) {
  Patches p{};
  const int vectors = c.channels / 8, strips = parts_of(c.out_width, kAlong<Stride>), rows = c.batch * c.out_height;
  p.chunks = parts_of(vectors, kVectors);
  p.vectors = parts_of(vectors, p.chunks);
  p.patches_across = parts_of(strips, kStrips);
  p.across = parts_of(strips, p.patches_across);
  p.down = kThreads / (p.vectors * p.across);
  // Small images: fewer rows a block, so that there are blocks for all multiprocessors.
  while (p.down > 1 && p.chunks * p.patches_across * parts_of(rows, p.down) < 2 * multiprocessors) p.down /= 2;
  p.patches = p.patches_across * parts_of(rows, p.down);
  return p;
}

template <class T, int Kernel, int Stride>
cudaError_t launch(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  const Patches p = patches_of<Stride>(c, multiprocessors);
  const int at_once = parts_of(kRounds * multiprocessors, p.chunks), blocks = p.chunks * std::min(p.patches, at_once);
  convolve_depthwise<T, Kernel, Stride><<<grid_of(blocks), p.vectors * p.across * p.down, 0, stream>>>({c, p});
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_size(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  if (c.kernel[0] == 3) {
    return c.stride[0] == 1 ? launch<T, 3, 1>(c, multiprocessors, stream) : launch<T, 3, 2>(c, multiprocessors, stream);
  }
  return c.stride[0] == 1 ? launch<T, 5, 1>(c, multiprocessors, stream) : launch<T, 5, 2>(c, multiprocessors, stream);
}

}  // namespace

bool is_depthwise(const Convolve& c) {
  const bool alike = c.kernel[0] == c.kernel[1] && c.stride[0] == c.stride[1] && c.dilation[0] == 1 && c.dilation[1] == 1;
  const bool known = (c.kernel[0] == 3 || c.kernel[0] == 5) && (c.stride[0] == 1 || c.stride[0] == 2);
  return alike && known && c.groups == c.channels && c.groups == c.out_channels;
}

cudaError_t convolve_depthwise(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  if (c.dtype == DType::f16) return launch_size<Half>(c, gpu.multiprocessors, stream);
  if (c.dtype == DType::bf16) return launch_size<BFloat16>(c, gpu.multiprocessors, stream);
  return cudaErrorInvalidValue;
}

}  // namespace normswap
