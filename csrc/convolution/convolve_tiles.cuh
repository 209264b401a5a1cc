// Convolutions of channels_last images as matrix products on tensor cores, one a group: pixels by output channels, summed
// over the kernel's taps and the channels, one behind the other. Scale, shift and residual are added to the float32 sums,
// which are rounded once, and then the activation is of that.
#pragma once

#include "convolution/channel_values.cuh"
#include "convolution/convolve.h"
#include "convolution/warpgroup.cuh"
#include "device/activation.cuh"
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
  static constexpr int Bytes = Stages * StageBytes + 2 * Across * 4;
  // Blocks of a multiprocessor of sm_90: by shared memory, and by registers, for the sums and as many as all else takes.
  static constexpr int OfMemory = 227 * 1024 / (Bytes + 1024), OfRegisters = 65536 / Threads / (Down * Across / Threads + 48);
  static constexpr int Blocks = OfMemory < OfRegisters ? OfMemory : OfRegisters;
  static_assert(Down % Stride == 0 && Across % Stride == 0 && Down * Across * 2 <= StageBytes && kValues * Across * 4 <= StageBytes);
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
  if constexpr (std::is_same_v<T, Half>) {
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
  int row, chunk, length;       // length: of a row of weights
  int tap_y, tap_x, channel;    // of the chunk that is next

  __device__ Source(const Convolve& c, const Channels& of) : c(c), of(of), row(threadIdx.x / kChunks), chunk(threadIdx.x % kChunks) {
    length = c.kernel[0] * c.kernel[1] * of.inputs;
    weights = static_cast<const T*>(c.conv_weight) + static_cast<int64_t>(of.first + row) * length;
  }

  // From the first channels on, of the tile from `first_pixel` on.
  __device__ void begin(int first_pixel) {
    tap_y = tap_x = 0;
    channel = 8 * chunk;
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
      T* to = pixels + at * kDepth + 8 * swizzled(at, chunk);
      copy_async_if(inside, to, input + static_cast<int64_t>(pixel) * c.channels);
    }
    const T* from = weights + (Pointwise ? 0 : (tap_y * c.kernel[1] + tap_x) * of.inputs) + channel;
#pragma unroll
    for (int i = 0; i < Tile::Across / Tile::Stride; ++i) {
      const int at = row + i * Tile::Stride;
      const bool inside = there && of.first + at < of.end;
      const T* source = from + static_cast<int64_t>(i) * Tile::Stride * length;
      copy_async_if(inside, channels + at * kDepth + 8 * swizzled(at, chunk), source);
    }
    channel += kDepth;
    if constexpr (!Pointwise) settle();
  }

 private:
  // Goes on to the tap that has `channel`.
  __device__ void settle() {
    while (channel >= of.inputs) {
      channel -= of.inputs;
      if (++tap_x == c.kernel[1]) tap_x = 0, ++tap_y;
    }
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

// The sums of a warp: fragments of 16 pixels by 8 channels, from (down, right) of the block's tile on, `Step` pixels apart.
// Without warpgroups each warp has a part of the tile; with them each has rows, and all channels.
template <class T, class Tile>
struct Sums {
  static constexpr int Warpgroups = Tile::Threads / 128, OfWarpgroup = Tile::Down / Warpgroups;
  static constexpr int Step = kWarpgroups ? 64 : 16;
  static constexpr int CountDown = (kWarpgroups ? OfWarpgroup : Tile::WarpDown) / Step;
  static constexpr int CountAcross = (kWarpgroups ? Tile::Across : Tile::WarpAcross) / 8;
  static_assert(Tile::Threads % 128 == 0 && OfWarpgroup % 64 == 0);

  int down, right;
  float of[CountDown][CountAcross][4];

  __device__ Sums() {
    const int warp = threadIdx.x / 32;
    down = kWarpgroups ? warp / 4 * OfWarpgroup + warp % 4 * 16 : warp / Tile::WarpsAcross * Tile::WarpDown;
    right = kWarpgroups ? 0 : warp % Tile::WarpsAcross * Tile::WarpAcross;
    if constexpr (!kWarpgroups) {
#pragma unroll
      for (int n = 0; n < CountDown * CountAcross * 4; ++n) of[n / 4 / CountAcross][n / 4 % CountAcross][n % 4] = 0.f;
    }
  }

  // Those of a stage, which run beside what follows.
  __device__ void start(const T* pixels, const T* channels, bool first) {
    const uint64_t a = operand_at(pixels + threadIdx.x / 128 * OfWarpgroup * kDepth), b = operand_at(channels);
    constexpr uint64_t rows_of_64 = 64 * kDepth * 2 / 16;
    begin_products();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int i = 0; i < CountDown; ++i) {
        start_product<T>(a + i * rows_of_64 + k * kNextDepth, b + k * kNextDepth, !first || k > 0, of[i]);
      }
    }
    end_products();
  }
  // Until the last ones started are there.
  __device__ void settle() {
    wait_for_products();
#pragma unroll
    for (int i = 0; i < CountDown; ++i) settled(of[i]);
  }

  // Those of a stage, without warpgroups.
  __device__ void add(const T* pixels, const T* channels) {
    const int lane = threadIdx.x % 32;
    pixels += down * kDepth;
    channels += right * kDepth;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      unsigned b[CountAcross / 2][4];
#pragma unroll
      for (int j = 0; j < CountAcross / 2; ++j) {
        const int row = 16 * j + lane % 8 + lane / 16 * 8;
        load_matrices(b[j], channels + row * kDepth + 8 * swizzled(row, 2 * k + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < CountDown; ++i) {
        unsigned a[4];
        const int row = 16 * i + lane % 16;
        load_matrices(a, pixels + row * kDepth + 8 * swizzled(row, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < CountAcross; ++j) {
          multiply_add<T>(of[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
};

// Tiles for all output channels.
template <class Tile>
__host__ __device__ inline int tiles_across(const Convolve& c) {
  return c.groups * ((c.out_channels / c.groups + Tile::Across - 1) / Tile::Across);
}

// A convolution and how many tiles it has, of all channels.
struct Tiles {
  Convolve c;
  int count;
};

// A block has every gridDim.x-th tile, all of the same channels.
template <class T, class Tile, bool Pointwise>
__global__ void __launch_bounds__(Tile::Threads, Tile::Blocks) convolve_tiles(const Tiles all) {
  const Convolve& c = all.c;
  const int tiles = all.count;
  extern __shared__ __align__(1024) char memory[];
  float2* scales = reinterpret_cast<float2*>(memory + Tile::Stages * Tile::StageBytes);  // and shifts
  const auto pixels_of = [&](int slot) { return reinterpret_cast<T*>(memory + slot * Tile::StageBytes); };
  const int across = tiles_across<Tile>(c), start = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const Channels of(c, start % across, Tile::Across);
  const auto first_pixel_of = [&](int tile) { return static_cast<int64_t>(tile / across) * Tile::Down; };
  Source<T, Tile, Pointwise> source(c, of);
  const int stages = (source.length + kDepth - 1) / kDepth;
  follow_predecessor();
  let_successor_start();

  // A tile's residual comes as if it were one more stage, in whose place the tile's output is put together.
  int fetched = start, stage_fetched = 0;
  source.begin(static_cast<int>(first_pixel_of(start)));
  const auto fetch = [&](int slot) {
    if (fetched < tiles) {
      T* to = pixels_of(slot);
      if (stage_fetched++ < stages) {
        source.next(to, to + Tile::Down * kDepth);
      } else {
        if (c.residual != nullptr) {
          each_chunk<Tile>(c, first_pixel_of(fetched), of, [&](int row, int chunk, int64_t element) {
            copy_async(to + place<Tile>(row, chunk), static_cast<const T*>(c.residual) + element);
          });
        }
        fetched += step;
        stage_fetched = 0;
        if (fetched < tiles) source.begin(static_cast<int>(first_pixel_of(fetched)));
      }
    }
    end_batch();
  };
  const auto after = [](int slot, int by) { return slot + by < Tile::Stages ? slot + by : slot + by - Tile::Stages; };
#pragma unroll
  for (int slot = 0; slot < Tile::Stages - 1; ++slot) fetch(slot);

  // A value a thread, in the slot that nothing is fetched to yet: one latency, not five.
  float* values = reinterpret_cast<float*>(pixels_of(Tile::Stages - 1));
  for (int i = threadIdx.x; i < kValues * Tile::Across; i += Tile::Threads) {
    const int which = i / Tile::Across, channel = min(of.first + i % Tile::Across, of.end - 1);
    values[i] = value_of(c, which, channel);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::Across; i += Tile::Threads) {
    scales[i] = scale_and_shift([&](Value which) { return values[which * Tile::Across + i]; }, c.eps);
  }

  const bool rectified = c.activation.code == Activation::relu;
  const int lane = threadIdx.x % 32;
  int slot = 0;
  for (int tile = start; tile < tiles; tile += step) {
    Sums<T, Tile> sums;
    for (int stage = 0; stage < stages; ++stage) {
      const T* pixels = pixels_of(slot);
      wait_for_all_but<Tile::Stages - 2>();
      if constexpr (kWarpgroups) {
        wait_for_products();  // of the stage before, whose operands are overwritten next
        show_to_products();
      }
      __syncthreads();
      if constexpr (kWarpgroups) sums.start(pixels, pixels + Tile::Down * kDepth, stage == 0);
      fetch(after(slot, Tile::Stages - 1));
      if constexpr (!kWarpgroups) sums.add(pixels, pixels + Tile::Down * kDepth);
      slot = after(slot, 1);
    }
    wait_for_all_but<Tile::Stages - 2>();
    if constexpr (kWarpgroups) sums.settle();
    __syncthreads();
    fetch(after(slot, Tile::Stages - 1));

    // Lane: two channels of rows lane / 4 and that plus 8 of every fragment.
    T* out = pixels_of(slot);
#pragma unroll
    for (int j = 0; j < sums.CountAcross; ++j) {
      const int channel = sums.right + 8 * j + lane % 4 * 2;
      const float4 by = *reinterpret_cast<const float4*>(scales + channel);
#pragma unroll
      for (int i = 0; i < sums.CountDown; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          T* at = out + place<Tile>(sums.down + sums.Step * i + 8 * half + lane / 4, channel / 8) + channel % 8;
          float low = fmaf(sums.of[i][j][2 * half], by.x, by.y);
          float high = fmaf(sums.of[i][j][2 * half + 1], by.z, by.w);
          if (c.residual != nullptr) low += to_float(at[0]), high += to_float(at[1]);
          if (rectified) low = low < 0.f ? 0.f : low, high = high < 0.f ? 0.f : high;  // a NaN stays
          *reinterpret_cast<unsigned*>(at) = pair_bits<T>(low, high);
        }
      }
    }
    __syncthreads();
    each_chunk<Tile>(c, first_pixel_of(tile), of, [&](int row, int chunk, int64_t element) {
      const auto rounded = Pack<T, 8>::load(out + place<Tile>(row, chunk));
      (rectified ? rounded : activated(rounded, c.activation)).store(static_cast<T*>(c.out) + element);
    });
    slot = after(slot, 1);
  }
}

template <class Tile>
int64_t tiles_of(const Convolve& c) {
  const int64_t pixels = static_cast<int64_t>(c.batch) * c.out_height * c.out_width;
  return (pixels + Tile::Down - 1) / Tile::Down * tiles_across<Tile>(c);
}

// As many blocks as run at once, each of them with tiles of the same channels, or one a tile where that would keep some of
// them waiting for others.
template <class T, class Tile, bool Pointwise>
cudaError_t launch_tiles(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  const int64_t tiles = tiles_of<Tile>(c), across = tiles_across<Tile>(c);
  const int64_t at_once = int64_t{Tile::Blocks} * gpu.multiprocessors / across * across;
  const bool even = at_once > 0 && 10 * tiles >= 9 * at_once * ceil_div(tiles, at_once);
  const LaunchShape shape{grid_of(even && at_once < tiles ? at_once : tiles), Tile::Threads, Tile::Bytes, 1, gpu.overlap};
  return launch_block<convolve_tiles<T, Tile, Pointwise>>(Tiles{c, static_cast<int>(tiles)}, shape, stream);
}

// Whether there are tiles for nine tenths of the places for their blocks.
template <class Tile>
bool fill(const Convolve& c, const Gpu& gpu) {
  return 10 * tiles_of<Tile>(c) >= static_cast<int64_t>(9) * Tile::Blocks * gpu.multiprocessors;
}

// The largest tiles that fill the device, small ones where one stage is all; the sums do not depend on it.
template <class T, bool Pointwise>
cudaError_t launch_largest(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  using Large = Tile<128, 128, 64, 32, 3>;
  using Flat = Tile<64, 128, 32, 64, 3>;
  using Tall = Tile<128, 64, 64, 32, 3>;
  using Small = Tile<64, 64, 32, 32, 4>;
  using Narrow = Tile<128, 32, 32, 32, 3>;
  const int channels = c.out_channels / c.groups;
  if constexpr (Pointwise) {
    using Shallow = Tile<128, 64, 64, 32, 2>;
    using ShallowNarrow = Tile<128, 32, 32, 32, 2>;
    if (c.channels / c.groups <= kDepth && channels <= Shallow::Across) {
      return channels <= ShallowNarrow::Across ? launch_tiles<T, ShallowNarrow, true>(c, gpu, stream)
                                               : launch_tiles<T, Shallow, true>(c, gpu, stream);
    }
  }
  if (channels <= Narrow::Across) return launch_tiles<T, Narrow, Pointwise>(c, gpu, stream);
  if (channels <= Tall::Across && fill<Tall>(c, gpu)) return launch_tiles<T, Tall, Pointwise>(c, gpu, stream);
  if (channels > Tall::Across && fill<Large>(c, gpu)) return launch_tiles<T, Large, Pointwise>(c, gpu, stream);
  if (channels > Tall::Across && fill<Flat>(c, gpu)) return launch_tiles<T, Flat, Pointwise>(c, gpu, stream);
  return launch_tiles<T, Small, Pointwise>(c, gpu, stream);
}

template <class T>
cudaError_t launch_form(const Convolve& c, const Gpu& gpu, cudaStream_t stream) {
  const auto both = [](const int (&pair)[2], int value) { return pair[0] == value && pair[1] == value; };
  const bool pointwise = both(c.kernel, 1) && both(c.stride, 1) && both(c.padding, 0);
  return pointwise ? launch_largest<T, true>(c, gpu, stream) : launch_largest<T, false>(c, gpu, stream);
}

}  // namespace
}  // namespace normswap
