// layer_norm of a permuted image: x lies as (outer, n, inner), y as (outer, inner, n), and every position is normalised over
// n. A block turns some of them over in shared memory, n in words (two elements of 16 bits); the lanes of a warp, or of a part
// of one, then take one position after the other. The order of a sum is a function of n and the dtype alone.
#include "dim/dim_permuted.h"

#include <algorithm>

#include "device/launch.h"
#include "device/reduce.cuh"

namespace normswap {
namespace {

constexpr int kPositions = 32;  // of a block: fewer where there would be fewer blocks than enough
constexpr int kFewPositions = 16;
constexpr int64_t kEnoughBlocks = 256;

template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

// Words from one position to the next in shared memory: odd, so that neither side meets the same bank twice.
template <class Index>
__host__ __device__ inline Index stride_of(Index words) {
  return words | 1;
}

struct Parameter {
  float weight, bias;
};

// Those of the channels of a word.
template <class T>
struct alignas(8 * kPerWord<T>) WordParameters {
  Parameter of[kPerWord<T>];
};

// How a block is cut.
struct Tiling {
  int words, positions, vec;  // of a position; of a block; positions of a load
};

// V positions of the channels of a word.
template <class T, int V>
struct Strip {
  Pack<T, V> channel[kPerWord<T>];

  __device__ void load(const T* x, int64_t inner) {
#pragma unroll
    for (int i = 0; i < kPerWord<T>; ++i) channel[i] = Pack<T, V>::load(x + i * inner);
  }
  __device__ unsigned word(int position) const {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(channel[0].v[position]);
    } else if constexpr (V == 1) {
      return channel[0].raw() | static_cast<unsigned>(channel[1].raw()) << 16;
    } else {
      const auto pair = [&](int i) { return reinterpret_cast<const unsigned*>(&channel[i])[position / 2]; };
      return __byte_perm(pair(0), pair(1), position % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
};

// Strips a lane has under way at once: of 64 bytes at most.
template <class T, int V>
constexpr int kStripsAhead = std::min(4, 64 / static_cast<int>(sizeof(Strip<T, V>)));

// Turns the block's positions over, from `first` on. A warp has all of them for some words at a time.
template <class T, int V>
__device__ inline void turn_over(const DimNorm& n, const T* x, int64_t first, const Tiling& tiling, unsigned* tile) {
  const int across = tiling.positions / V, position = threadIdx.x % across * V;
  if (first + position >= n.inner) return;
  constexpr int Ahead = kStripsAhead<T, V>;
  const int stride = stride_of(tiling.words), step = blockDim.x / across;
  for (int begin = threadIdx.x / across; begin < tiling.words; begin += Ahead * step) {
    Strip<T, V> strips[Ahead];
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const int word = begin + i * step;
      if (word < tiling.words) strips[i].load(x + word * kPerWord<T> * n.inner + first + position, n.inner);
    }
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const int word = begin + i * step;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (word < tiling.words) tile[(position + j) * stride + word] = strips[i].word(j);
      }
    }
  }
}

// Calls with(float, index in the word) for the elements of a word.
template <class T, class With>
__device__ inline void each_of(unsigned word, With with) {
  if constexpr (sizeof(T) == 4) {
    with(__uint_as_float(word), 0);
  } else {
    const float2 pair = floats_of_pair<T>(word);
    with(pair.x, 0);
    with(pair.y, 1);
  }
}

// A position, of which each of Lanes lanes has every Lanes-th word: in registers, if these are Held for each; 0: however many.
template <class T, int Lanes, int Held>
struct Position {
  const unsigned* row;
  int words;
  unsigned held[Held > 0 ? Held : 1];

  __device__ Position(const unsigned* of, int count) : row(of), words(count) {
#pragma unroll
    for (int k = 0; k < Held; ++k) held[k] = row[lane() + k * Lanes];
  }
  __device__ static int lane() { return threadIdx.x % Lanes; }
  // Calls with(index, word) for those of the lane.
  template <class With>
  __device__ void each(With with) const {
    if constexpr (Held > 0) {
#pragma unroll
      for (int k = 0; k < Held; ++k) with(lane() + k * Lanes, held[k]);
    } else {
#pragma unroll 4
      for (int i = lane(); i < words; i += Lanes) with(i, row[i]);
    }
  }
  // All of its lanes hold them.
  __device__ float2 mean_and_rstd(const DimNorm& n) const {
    const Divisor size = Divisor::of(static_cast<float>(n.n));
    float sum[1] = {};
    each([&](int, unsigned word) {
      each_of<T>(word, [&](float x, int) { sum[0] = __fadd_rn(sum[0], x); });
    });
    lanes_sum<Lanes>(sum);
    const float mean = size.divide<true>(sum[0]);
    sum[0] = 0.f;
    each([&](int, unsigned word) {
      each_of<T>(word, [&](float x, int) {
        const float d = __fsub_rn(x, mean);
        sum[0] = fmaf(d, d, sum[0]);
      });
    });
    lanes_sum<Lanes>(sum);
    return {mean, rsqrtf(__fadd_rn(size.mean_of(sum[0]), static_cast<float>(n.eps)))};
  }
  __device__ void store(float2 values, const Parameter* parameters, unsigned* y) const {
    constexpr int per = kPerWord<T>;
    each([&](int i, unsigned word) {
      const WordParameters<T> p = reinterpret_cast<const WordParameters<T>*>(parameters)[i];
      float out[per];
      each_of<T>(word, [&](float x, int j) {
        out[j] = fmaf(__fmul_rn(__fsub_rn(x, values.x), values.y), p.of[j].weight, p.of[j].bias);
      });
      if constexpr (per == 1) {
        y[i] = __float_as_uint(out[0]);
      } else {
        y[i] = pair_bits<T>(out[0], out[1]);
      }
    });
  }
};

template <class T, int Lanes, int Held>
__global__ void __launch_bounds__(256) permuted_layer_norm(const DimNorm n, const Tiling tiling) {
  extern __shared__ __align__(16) char memory[];
  Parameter* parameters = reinterpret_cast<Parameter*>(memory);
  unsigned* tile = reinterpret_cast<unsigned*>(parameters + n.n);
  const int64_t tiles = (n.inner + tiling.positions - 1) / tiling.positions, outer = blockIdx.x / tiles;
  const int64_t first = (blockIdx.x - outer * tiles) * tiling.positions;
  const T* x = static_cast<const T*>(n.x) + outer * n.n * n.inner;
  constexpr int full = 16 / sizeof(T);
  if (tiling.vec == full) {
    turn_over<T, full>(n, x, first, tiling, tile);
  } else if (full > 4 && tiling.vec == 4) {
    turn_over<T, 4>(n, x, first, tiling, tile);
  } else {
    turn_over<T, 1>(n, x, first, tiling, tile);
  }
  for (int i = threadIdx.x; i < n.n; i += blockDim.x) {
    parameters[i] = {loaded_parameter(n.weight, i, 1.f), loaded_parameter(n.bias, i, 0.f)};
  }
  __syncthreads();
  const int there = static_cast<int>(min(n.inner - first, static_cast<int64_t>(tiling.positions)));
  const int apart = tiling.positions * Lanes / 32;  // those of a warp: in banks that follow each other
  for (int nth = threadIdx.x / 32; nth < apart; nth += blockDim.x / 32) {
    const int index = threadIdx.x % 32 / Lanes * apart + nth;
    const Position<T, Lanes, Held> position(tile + min(index, there - 1) * stride_of(tiling.words), tiling.words);
    const float2 values = position.mean_and_rstd(n);
    if (index >= there) continue;
    const int64_t at = outer * n.inner + first + index;
    if (position.lane() == 0) {
      if (n.mean != nullptr) n.mean[at] = values.x;
      if (n.statistic != nullptr) n.statistic[at] = values.y;
    }
    position.store(values, parameters, static_cast<unsigned*>(n.y) + at * tiling.words);
  }
}

template <class T>
Tiling tiling_of(const DimNorm& n) {
  constexpr int64_t full = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(n.x) % 16 == 0;
  const int vec = !aligned ? 1 : n.inner % full == 0 ? full : n.inner % 4 == 0 ? 4 : 1;
  const bool fewer = n.outer * ceil_div(n.inner, kPositions) < kEnoughBlocks;
  return {static_cast<int>(n.n) / kPerWord<T>, fewer ? kFewPositions : kPositions, vec};
}

template <class T, int Lanes, int Held>
cudaError_t launch_held(const DimNorm& n, const Tiling& tiling, cudaStream_t stream) {
  const dim3 grid = grid_of(n.outer * ceil_div(n.inner, tiling.positions));
  const int bytes = static_cast<int>(layer_norm_permuted_bytes(n));
  constexpr auto kernel = permuted_layer_norm<T, Lanes, Held>;
  if (const cudaError_t error = allow_shared<kernel>(bytes); error != cudaSuccess) return error;
  kernel<<<grid, Lanes == 8 ? 128 : 256, bytes, stream>>>(n, tiling);
  return cudaGetLastError();
}

// Of 16 bits the numbers of channels that networks have are worth kernels: 96, 192 and 384, 128, 256 and 512, and 768.
template <class T, int Lanes>
cudaError_t launch_lanes(const DimNorm& n, const Tiling& tiling, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (tiling.words == 6 * Lanes) return launch_held<T, Lanes, 6>(n, tiling, stream);
    if (tiling.words == 8 * Lanes) return launch_held<T, Lanes, 8>(n, tiling, stream);
    if constexpr (Lanes == 32) {
      if (tiling.words == 12 * Lanes) return launch_held<T, Lanes, 12>(n, tiling, stream);
    }
  }
  return launch_held<T, Lanes, 0>(n, tiling, stream);
}

template <class T>
cudaError_t launch_dtype(const DimNorm& n, cudaStream_t stream) {
  const Tiling tiling = tiling_of<T>(n);
  if (tiling.words <= 64) return launch_lanes<T, 8>(n, tiling, stream);
  if (tiling.words <= 128) return launch_lanes<T, 16>(n, tiling, stream);
  return launch_lanes<T, 32>(n, tiling, stream);
}

}  // namespace

int64_t layer_norm_permuted_bytes(const DimNorm& n) {
  const int64_t per = n.dtype == DType::f32 ? 1 : 2, words = n.n / per;
  if (n.n % per != 0 || words > 65536 || n.outer * ceil_div(n.inner, kFewPositions) > 0x7fffffff) return 0;
  return n.n * sizeof(Parameter) + kPositions * stride_of(words) * 4;
}

cudaError_t layer_norm_permuted(const DimNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_dtype<float>(n, stream);
    case DType::f16: return launch_dtype<Half>(n, stream);
    default: return launch_dtype<BFloat16>(n, stream);
  }
}

}  // namespace normswap
