// Convolutions of channels_last images as matrix products on tensor cores: pixels by output channels, summed over the
// kernel's taps and the channels. Scale, shift and residual are added to the float32 sums, which are rounded once, and then
// the activation is of that.
#include "convolution/convolve.h"
#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/copy.cuh"
#include "device/launch.h"
#include "device/vec.cuh"

namespace normswap {
namespace {

constexpr int kDepth = 64;            // channels of a tap that are multiplied at once: 128 bytes a row
constexpr int kChunks = kDepth / 8;   // of 16 bytes
// What an output channel has beside its weights, in the order in which it is kept.
enum Value { kVariance, kMean, kWeight, kBias, kConvBias, kValues };

// Down: pixels of a block's tile, Across: its output channels; the same of a warp's; Stages of operands in flight.
template <int kDown, int kAcross, int kWarpDown, int kWarpAcross, int kStageCount>
struct Tile {
  static constexpr int Down = kDown, Across = kAcross, Stages = kStageCount;
  static constexpr int WarpDown = kWarpDown, WarpAcross = kWarpAcross;
  static constexpr int WarpsDown = Down / WarpDown, WarpsAcross = Across / WarpAcross;
  static constexpr int Threads = 32 * WarpsDown * WarpsAcross;
  static constexpr int Stride = Threads / kChunks;  // rows that the threads copy at once
  static constexpr int StageBytes = (Down + Across) * kDepth * 2;
  static constexpr int Bytes = Stages * StageBytes + kValues * Across * 4;
  static constexpr int Blocks = 227 * 1024 / (Bytes + 1024);  // of a multiprocessor of sm_90
  static_assert(Down % Stride == 0 && Across % Stride == 0 && Down * Across * 2 <= StageBytes);
};

// 16 bytes that arrive later, or zeros where they are not there, as `global` need not be then.
__device__ inline void copy_async_if(bool there, void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// Which 16 bytes of a row of 128 hold `chunk`: rows that are read together lie in different banks.
__device__ inline int swizzled(int row, int chunk) { return chunk ^ (row & 7); }

__device__ inline void load_matrices(unsigned (&out)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared)));
}

template <class T>
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// What a thread copies of the operands: chunk `chunk` of every Stride-th row of both tiles.
template <class T, class Tile>
struct Source {
  const Convolve& c;
  int64_t starts[Tile::Down / Tile::Stride];  // of the rows' pixels, at the first tap
  int tops[Tile::Down / Tile::Stride], lefts[Tile::Down / Tile::Stride];
  const T* weights;
  int row, chunk, first_channel;
  int tap_y = 0, tap_x = 0, channel = 0;

  __device__ Source(const Convolve& c, int64_t first_pixel, int first_channel)
      : c(c), row(threadIdx.x / kChunks), chunk(threadIdx.x % kChunks), first_channel(first_channel) {
    const int64_t taps = static_cast<int64_t>(c.kernel[0]) * c.kernel[1];
    weights = static_cast<const T*>(c.conv_weight) + (first_channel + row) * taps * c.channels + 8 * chunk;
    const int pixels = c.out_height * c.out_width;
#pragma unroll
    for (int i = 0; i < Tile::Down / Tile::Stride; ++i) {
      const int64_t pixel = first_pixel + row + i * Tile::Stride;
      const bool inside = pixel < static_cast<int64_t>(c.batch) * pixels;
      const int image = inside ? static_cast<int>(pixel / pixels) : 0, place = static_cast<int>(pixel % pixels);
      tops[i] = inside ? place / c.out_width * c.stride[0] - c.padding[0] : -(1 << 30);
      lefts[i] = place % c.out_width * c.stride[1] - c.padding[1];
      starts[i] = ((static_cast<int64_t>(image) * c.height + tops[i]) * c.width + lefts[i]) * c.channels + 8 * chunk;
    }
  }

  // Copies the next kDepth channels of a tap; what is outside is zero.
  __device__ void next(T* pixels, T* channels) {
    const bool there = channel + 8 * chunk < c.channels;
    const int down = tap_y * c.dilation[0], right = tap_x * c.dilation[1];
    const int64_t step = (static_cast<int64_t>(down) * c.width + right) * c.channels + channel;
    const T* input = static_cast<const T*>(c.input);
#pragma unroll
    for (int i = 0; i < Tile::Down / Tile::Stride; ++i) {
      const int y = tops[i] + down, x = lefts[i] + right, at = row + i * Tile::Stride;
      const bool inside = there && static_cast<unsigned>(y) < static_cast<unsigned>(c.height) &&
                          static_cast<unsigned>(x) < static_cast<unsigned>(c.width);
      copy_async_if(inside, pixels + at * kDepth + 8 * swizzled(at, chunk), input + (inside ? starts[i] + step : 0));
    }
    const int64_t length = static_cast<int64_t>(c.kernel[0]) * c.kernel[1] * c.channels;
    const int64_t from = static_cast<int64_t>(tap_y * c.kernel[1] + tap_x) * c.channels + channel;
#pragma unroll
    for (int i = 0; i < Tile::Across / Tile::Stride; ++i) {
      const int at = row + i * Tile::Stride;
      const bool inside = there && first_channel + at < c.out_channels;
      const T* source = inside ? weights + i * Tile::Stride * length + from : static_cast<const T*>(c.conv_weight);
      copy_async_if(inside, channels + at * kDepth + 8 * swizzled(at, chunk), source);
    }
    if ((channel += kDepth) < c.channels) return;
    channel = 0;
    if (++tap_x == c.kernel[1]) tap_x = 0, ++tap_y;
  }
};

// Calls each(row of the tile, chunk, element of the output) for every 16 bytes of the output that a thread copies.
template <class Tile, class Each>
__device__ inline void each_chunk(const Convolve& c, int64_t first_pixel, int first_channel, Each each) {
  constexpr int across = Tile::Across / 8;
  const int64_t pixels = static_cast<int64_t>(c.batch) * c.out_height * c.out_width;
#pragma unroll 4
  for (int i = threadIdx.x; i < Tile::Down * across; i += Tile::Threads) {
    const int row = i / across, chunk = i % across, channel = first_channel + 8 * chunk;
    if (first_pixel + row >= pixels || channel >= c.out_channels) continue;
    each(row, chunk, (first_pixel + row) * c.out_channels + channel);
  }
}

template <class Tile>
__device__ inline int place(int row, int chunk) {
  return row * Tile::Across + 8 * swizzled(row, chunk);
}

// A warp's sums of a stage: fragments of 16 pixels by 8 channels.
template <class T, class Tile>
__device__ inline void multiply(const T* pixels, const T* channels,
                                float (&sums)[Tile::WarpDown / 16][Tile::WarpAcross / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    unsigned b[Tile::WarpAcross / 16][4];
#pragma unroll
    for (int j = 0; j < Tile::WarpAcross / 16; ++j) {
      const int row = 16 * j + lane % 8 + lane / 16 * 8;
      load_matrices(b[j], channels + row * kDepth + 8 * swizzled(row, 2 * k + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < Tile::WarpDown / 16; ++i) {
      unsigned a[4];
      const int row = 16 * i + lane % 16;
      load_matrices(a, pixels + row * kDepth + 8 * swizzled(row, 2 * k + lane / 16));
#pragma unroll
      for (int j = 0; j < Tile::WarpAcross / 8; ++j) {
        multiply_add<T>(sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// What the norm does to the sum of a channel, of which `values` are Across apart.
template <int Across>
__device__ inline float2 scale_and_shift(const float* values, double eps) {
  const auto value = [&](Value which) { return values[which * Across]; };
  const float scale = rsqrtf(value(kVariance) + static_cast<float>(eps)) * value(kWeight);
  return {scale, fmaf(scale, value(kConvBias) - value(kMean), value(kBias))};
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::Blocks) convolve_tiles(const Convolve c) {
  extern __shared__ __align__(128) char memory[];
  float* values = reinterpret_cast<float*>(memory + Tile::Stages * Tile::StageBytes);
  const auto pixels_of = [&](int stage) { return reinterpret_cast<T*>(memory + stage * Tile::StageBytes); };
  const int blocks_across = (c.out_channels + Tile::Across - 1) / Tile::Across;
  const int first_channel = static_cast<int>(blockIdx.x) % blocks_across * Tile::Across;
  const int64_t first_pixel = static_cast<int64_t>(blockIdx.x) / blocks_across * Tile::Down;
  const int stages = c.kernel[0] * c.kernel[1] * ((c.channels + kDepth - 1) / kDepth);
  Source<T, Tile> source(c, first_pixel, first_channel);

  // The residual comes as if it were one more stage.
  const auto fetch = [&](int stage) {
    T* to = pixels_of(stage % Tile::Stages);
    if (stage < stages) {
      source.next(to, to + Tile::Down * kDepth);
    } else if (stage == stages && c.residual != nullptr) {
      each_chunk<Tile>(c, first_pixel, first_channel, [&](int row, int chunk, int64_t element) {
        copy_async(to + place<Tile>(row, chunk), static_cast<const T*>(c.residual) + element);
      });
    }
    end_batch();
  };
#pragma unroll
  for (int stage = 0; stage < Tile::Stages - 1; ++stage) fetch(stage);

  // A value a thread: one latency, not five.
  for (int i = threadIdx.x; i < kValues * Tile::Across; i += Tile::Threads) {
    const int which = i / Tile::Across, channel = min(first_channel + i % Tile::Across, c.out_channels - 1);
    values[i] = channel_value(c.of_channels[which], channel, which == kWeight ? 1.f : 0.f);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int down = warp / Tile::WarpsAcross * Tile::WarpDown, across = warp % Tile::WarpsAcross * Tile::WarpAcross;
  float sums[Tile::WarpDown / 16][Tile::WarpAcross / 8][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_all_but<Tile::Stages - 2>();
    __syncthreads();
    fetch(stage + Tile::Stages - 1);
    const T* pixels = pixels_of(stage % Tile::Stages);
    multiply<T, Tile>(pixels + down * kDepth, pixels + (Tile::Down + across) * kDepth, sums);
  }
  wait_for_copies();
  __syncthreads();

  // Lane: two channels of rows lane / 4 and that plus 8 of every fragment.
  T* tile = pixels_of(stages % Tile::Stages);
  const bool rectified = c.activation.code == Activation::relu;
#pragma unroll
  for (int j = 0; j < Tile::WarpAcross / 8; ++j) {
    const int channel = across + 8 * j + lane % 4 * 2;
    const float2 low_by = scale_and_shift<Tile::Across>(values + channel, c.eps);
    const float2 high_by = scale_and_shift<Tile::Across>(values + channel + 1, c.eps);
#pragma unroll
    for (int i = 0; i < Tile::WarpDown / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* at = tile + place<Tile>(down + 16 * i + 8 * half + lane / 4, channel / 8) + channel % 8;
        float low = fmaf(sums[i][j][2 * half], low_by.x, low_by.y);
        float high = fmaf(sums[i][j][2 * half + 1], high_by.x, high_by.y);
        if (c.residual != nullptr) low += to_float(at[0]), high += to_float(at[1]);
        if (rectified) low = low < 0.f ? 0.f : low, high = high < 0.f ? 0.f : high;  // a NaN stays
        *reinterpret_cast<unsigned*>(at) = pair_bits<T>(low, high);
      }
    }
  }
  __syncthreads();
  each_chunk<Tile>(c, first_pixel, first_channel, [&](int row, int chunk, int64_t element) {
    const auto rounded = Pack<T, 8>::load(tile + place<Tile>(row, chunk));
    (rectified ? rounded : activated(rounded, c.activation)).store(static_cast<T*>(c.out) + element);
  });
}

template <class Tile>
int64_t blocks_of(const Convolve& c) {
  const int64_t pixels = static_cast<int64_t>(c.batch) * c.out_height * c.out_width;
  return (pixels + Tile::Down - 1) / Tile::Down * ((c.out_channels + Tile::Across - 1) / Tile::Across);
}

template <class T, class Tile>
cudaError_t launch_tiles(const Convolve& c, cudaStream_t stream) {
  return launch_block<convolve_tiles<T, Tile>>(c, {grid_of(blocks_of<Tile>(c)), Tile::Threads, Tile::Bytes, 1, false}, stream);
}

// How long tiles of this size take, in products of the busiest multiprocessor, of which small tiles need more time each.
template <class Tile>
double time_of(const Convolve& c, int multiprocessors) {
  const double rounds = static_cast<double>((blocks_of<Tile>(c) + multiprocessors - 1) / multiprocessors);
  return rounds * Tile::Down * Tile::Across * (1.0 + 8.0 / Tile::Down + 8.0 / Tile::Across);
}

// Tiles of the size that takes least; the sums do not depend on it.
template <class T>
cudaError_t launch_fastest(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  using Large = Tile<128, 128, 64, 64, 3>;
  using Tall = Tile<128, 64, 64, 32, 3>;
  using Small = Tile<64, 64, 32, 32, 4>;
  const double large = time_of<Large>(c, multiprocessors), tall = time_of<Tall>(c, multiprocessors);
  const double small = time_of<Small>(c, multiprocessors);
  if (large <= tall && large <= small) return launch_tiles<T, Large>(c, stream);
  return tall <= small ? launch_tiles<T, Tall>(c, stream) : launch_tiles<T, Small>(c, stream);
}

}  // namespace

cudaError_t convolve(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  if (c.dtype == DType::f16) return launch_fastest<__half>(c, multiprocessors, stream);
  if (c.dtype == DType::bf16) return launch_fastest<__nv_bfloat16>(c, multiprocessors, stream);
  return cudaErrorInvalidValue;
}

}  // namespace normswap
