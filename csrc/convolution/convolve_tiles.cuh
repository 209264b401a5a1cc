// Convolutions of channels_last images as matrix products on tensor cores, one a group: pixels by output channels, summed
// over the kernel's taps and the channels, one behind the other. Scale, shift and residual are added to the float32 sums,
// which are rounded once, and then the activation is of that.
#pragma once

#include "convolution/channel_values.cuh"
#include "convolution/convolve.h"
#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/copy.cuh"
#include "device/launch.h"
#include "device/vec.cuh"

namespace normswap {
namespace {

constexpr int kDepth = 64;            // channels, of one tap or several, that are multiplied at once: 128 bytes a row
constexpr int kChunks = kDepth / 8;   // of 16 bytes

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

// 16 bytes that arrive later, or zeros where they are not there. By a store: compute-sanitizer does not know that a copy of
// no bytes fills.
__device__ inline void copy_async_if(bool there, void* shared, const void* global) {
  if (there) {
    copy_async(shared, global);
  } else {
    *static_cast<uint4*>(shared) = uint4{0, 0, 0, 0};
  }
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

// The output channels of a block's tile, all of one group, and the first of that group's input channels.
struct Channels {
  int first, end, first_input, inputs;

  // `across` output channels a tile.
  __device__ Channels(const Convolve& c, int tile, int across) : inputs(c.channels / c.groups) {
    const int outputs = c.out_channels / c.groups, tiles = (outputs + across - 1) / across, group = tile / tiles;
    first = group * outputs + tile % tiles * across;
    end = (group + 1) * outputs;
    first_input = group * inputs;
  }
};

// What a thread copies of the operands: chunk `chunk` of every Stride-th row of both tiles. Pointwise: one tap, and a pixel
// of the input for each of the output.
template <class T, class Tile, bool Pointwise>
struct Source {
  static constexpr int Rows = Tile::Down / Tile::Stride, Kept = Pointwise ? 1 : Rows;
  const Convolve& c;
  const Channels& of;
  int starts[Kept], tops[Kept], lefts[Kept];  // the rows' pixels, and their places in the image, at the first tap
  const T* weights;
  int row, chunk, length;            // length: of a row of weights
  int tap_y = 0, tap_x = 0, channel;  // of the chunk that is next

  __device__ Source(const Convolve& c, const Channels& of, int first_pixel)
      : c(c), of(of), row(threadIdx.x / kChunks), chunk(threadIdx.x % kChunks), channel(8 * chunk) {
    length = c.kernel[0] * c.kernel[1] * of.inputs;
    weights = static_cast<const T*>(c.conv_weight) + static_cast<int64_t>(of.first + row) * length + 8 * chunk;
    starts[0] = first_pixel + row;
    if constexpr (!Pointwise) {
      const int line = starts[0] / c.out_width;
      int image = line / c.out_height, y = line % c.out_height, x = starts[0] % c.out_width;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        tops[i] = image < c.batch ? y * c.stride[0] - c.padding[0] : -(1 << 30);
        lefts[i] = x * c.stride[1] - c.padding[1];
        starts[i] = image < c.batch ? (image * c.height + tops[i]) * c.width + lefts[i] : 0;
        for (x += Tile::Stride; x >= c.out_width; x -= c.out_width) {
          if (++y == c.out_height) y = 0, ++image;
        }
      }
      settle();
    }
  }

  // Goes on to the tap that has `channel`.
  __device__ void settle() {
    while (channel >= of.inputs) {
      channel -= of.inputs;
      if (++tap_x == c.kernel[1]) tap_x = 0, ++tap_y;
    }
  }

  // Copies the chunks of the next kDepth channels; what is outside is zero.
  __device__ void next(T* pixels, T* channels) {
    const bool there = Pointwise ? channel < of.inputs : tap_y < c.kernel[0];
    const int down = Pointwise ? 0 : tap_y * c.dilation[0], right = Pointwise ? 0 : tap_x * c.dilation[1];
    const T* input = static_cast<const T*>(c.input) + of.first_input + channel;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int at = row + i * Tile::Stride;
      int pixel = starts[0] + i * Tile::Stride;
      bool inside = there && pixel < c.batch * c.out_height * c.out_width;
      if constexpr (!Pointwise) {
        pixel = starts[i] + down * c.width + right;
        inside = there && static_cast<unsigned>(tops[i] + down) < static_cast<unsigned>(c.height) &&
                 static_cast<unsigned>(lefts[i] + right) < static_cast<unsigned>(c.width);
      }
      copy_async_if(inside, pixels + at * kDepth + 8 * swizzled(at, chunk), input + static_cast<int64_t>(pixel) * c.channels);
    }
#pragma unroll
    for (int i = 0; i < Tile::Across / Tile::Stride; ++i) {
      const int at = row + i * Tile::Stride;
      const bool inside = there && of.first + at < of.end;
      const T* source = weights + static_cast<int64_t>(i) * Tile::Stride * length;
      copy_async_if(inside, channels + at * kDepth + 8 * swizzled(at, chunk), source);
    }
    weights += kDepth;
    channel += kDepth;
    if constexpr (!Pointwise) settle();
  }
};

// Calls each(row of the tile, chunk, element of the output) for every 16 bytes of the output that a thread copies.
template <class Tile, class Each>
__device__ inline void each_chunk(const Convolve& c, int64_t first_pixel, const Channels& of, Each each) {
  constexpr int across = Tile::Across / 8;
  const int64_t pixels = static_cast<int64_t>(c.batch) * c.out_height * c.out_width;
#pragma unroll 4
  for (int i = threadIdx.x; i < Tile::Down * across; i += Tile::Threads) {
    const int row = i / across, chunk = i % across, channel = of.first + 8 * chunk;
    if (first_pixel + row >= pixels || channel >= of.end) continue;
    each(row, chunk, (first_pixel + row) * c.out_channels + channel);
  }
}

template <class Tile>
__device__ inline int place(int row, int chunk) {
  return row * Tile::Across + 8 * swizzled(row % (Tile::Across / 8), chunk);
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

// Tiles for all output channels.
template <class Tile>
__host__ __device__ inline int tiles_across(const Convolve& c) {
  return c.groups * ((c.out_channels / c.groups + Tile::Across - 1) / Tile::Across);
}

template <class T, class Tile, bool Pointwise>
__global__ void __launch_bounds__(Tile::Threads, Tile::Blocks) convolve_tiles(const Convolve c) {
  extern __shared__ __align__(128) char memory[];
  float* values = reinterpret_cast<float*>(memory + Tile::Stages * Tile::StageBytes);
  const auto pixels_of = [&](int stage) { return reinterpret_cast<T*>(memory + stage * Tile::StageBytes); };
  const int across = tiles_across<Tile>(c);
  const Channels of(c, static_cast<int>(blockIdx.x) % across, Tile::Across);
  const int64_t first_pixel = static_cast<int64_t>(blockIdx.x) / across * Tile::Down;
  Source<T, Tile, Pointwise> source(c, of, static_cast<int>(first_pixel));
  const int stages = (source.length + kDepth - 1) / kDepth;

  // The residual comes as if it were one more stage.
  const auto fetch = [&](int stage) {
    T* to = pixels_of(stage % Tile::Stages);
    if (stage < stages) {
      source.next(to, to + Tile::Down * kDepth);
    } else if (stage == stages && c.residual != nullptr) {
      each_chunk<Tile>(c, first_pixel, of, [&](int row, int chunk, int64_t element) {
        copy_async(to + place<Tile>(row, chunk), static_cast<const T*>(c.residual) + element);
      });
    }
    end_batch();
  };
#pragma unroll
  for (int stage = 0; stage < Tile::Stages - 1; ++stage) fetch(stage);

  // A value a thread: one latency, not five.
  for (int i = threadIdx.x; i < kValues * Tile::Across; i += Tile::Threads) {
    const int which = i / Tile::Across, channel = min(of.first + i % Tile::Across, of.end - 1);
    values[i] = value_of(c, which, channel);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int down = warp / Tile::WarpsAcross * Tile::WarpDown, right = warp % Tile::WarpsAcross * Tile::WarpAcross;
  float sums[Tile::WarpDown / 16][Tile::WarpAcross / 8][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_all_but<Tile::Stages - 2>();
    __syncthreads();
    fetch(stage + Tile::Stages - 1);
    const T* pixels = pixels_of(stage % Tile::Stages);
    multiply<T, Tile>(pixels + down * kDepth, pixels + (Tile::Down + right) * kDepth, sums);
  }
  wait_for_copies();
  __syncthreads();

  // Lane: two channels of rows lane / 4 and that plus 8 of every fragment.
  T* tile = pixels_of(stages % Tile::Stages);
  const bool rectified = c.activation.code == Activation::relu;
#pragma unroll
  for (int j = 0; j < Tile::WarpAcross / 8; ++j) {
    const int channel = right + 8 * j + lane % 4 * 2;
    const auto of = [&](int at) {
      return scale_and_shift([&](Value which) { return values[which * Tile::Across + at]; }, c.eps);
    };
    const float2 low_by = of(channel), high_by = of(channel + 1);
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
  each_chunk<Tile>(c, first_pixel, of, [&](int row, int chunk, int64_t element) {
    const auto rounded = Pack<T, 8>::load(tile + place<Tile>(row, chunk));
    (rectified ? rounded : activated(rounded, c.activation)).store(static_cast<T*>(c.out) + element);
  });
}

template <class Tile>
int64_t blocks_of(const Convolve& c) {
  const int64_t pixels = static_cast<int64_t>(c.batch) * c.out_height * c.out_width;
  return (pixels + Tile::Down - 1) / Tile::Down * tiles_across<Tile>(c);
}

template <class T, class Tile, bool Pointwise>
cudaError_t launch_tiles(const Convolve& c, cudaStream_t stream) {
  const LaunchShape shape{grid_of(blocks_of<Tile>(c)), Tile::Threads, Tile::Bytes, 1, false};
  return launch_block<convolve_tiles<T, Tile, Pointwise>>(c, shape, stream);
}

// Whether there are tiles for nine tenths of the places for their blocks.
template <class Tile>
bool fill(const Convolve& c, int multiprocessors) {
  return 10 * blocks_of<Tile>(c) >= static_cast<int64_t>(9) * Tile::Blocks * multiprocessors;
}

// The largest tiles that fill the device, small ones where one stage is all; the sums do not depend on it.
template <class T, bool Pointwise>
cudaError_t launch_largest(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  using Large = Tile<128, 128, 64, 32, 3>;
  using Tall = Tile<128, 64, 64, 32, 3>;
  using Small = Tile<64, 64, 32, 32, 4>;
  using Narrow = Tile<128, 32, 32, 32, 3>;
  const int channels = c.out_channels / c.groups;
  if constexpr (Pointwise) {
    using Shallow = Tile<64, 64, 32, 32, 2>;
    using ShallowNarrow = Tile<128, 32, 32, 32, 2>;
    const bool one = c.channels / c.groups <= kDepth;
    if (one && channels <= ShallowNarrow::Across) return launch_tiles<T, ShallowNarrow, true>(c, stream);
    if (one) return launch_tiles<T, Shallow, true>(c, stream);
  }
  if (channels <= Narrow::Across) return launch_tiles<T, Narrow, Pointwise>(c, stream);
  if (channels > Tall::Across && fill<Large>(c, multiprocessors)) return launch_tiles<T, Large, Pointwise>(c, stream);
  if (fill<Tall>(c, multiprocessors)) return launch_tiles<T, Tall, Pointwise>(c, stream);
  return launch_tiles<T, Small, Pointwise>(c, stream);
}

template <class T>
cudaError_t launch_form(const Convolve& c, int multiprocessors, cudaStream_t stream) {
  const auto both = [](const int (&pair)[2], int value) { return pair[0] == value && pair[1] == value; };
  const bool pointwise = both(c.kernel, 1) && both(c.stride, 1) && both(c.padding, 0);
  return pointwise ? launch_largest<T, true>(c, multiprocessors, stream) : launch_largest<T, false>(c, multiprocessors, stream);
}

}  // namespace
}  // namespace normswap
