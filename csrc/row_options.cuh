// LayerNorm, RMSNorm and L2 norm with all that may stand before and behind them (RowOptions), chosen at run time: kernels of
// their own for every choice would be hundreds. A norm that stands alone has such kernels (row_policy.cuh); the statistics,
// and what is normalised, have the same bits here.
#pragma once

#include "row_policy.cuh"

namespace normswap {
namespace {

// Statistics are those of LayerNorm. Without a mean the chunks' sums of squares are united as Sum's are.
struct OptionsPolicy {
  using Stat = Moments;
  static constexpr Affine affine = Affine::with_options;
  static constexpr bool has_bias = false;
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], const Divisor& size, const RowArgs& args, Stat (&out)[Rows]) {
    float mean[Rows] = {}, m2[Rows];
    const auto square = [](float d, float into) { return fmaf(d, d, into); };
    if (args.n.kind == NormKind::layer) {
      chunk_sums<false>(tiles, mean, mean, [](float x, float into) { return __fadd_rn(into, x); });
#pragma unroll
      for (int r = 0; r < Rows; ++r) mean[r] = size.divide<true>(mean[r]);
      chunk_sums<true>(tiles, mean, m2, square);
    } else {
      chunk_sums<false>(tiles, mean, m2, square);
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) out[r] = tiles[r].len > 0 ? Stat{mean[r], m2[r], size.value} : Stat{};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowArgs& a) {
    if (a.n.kind != NormKind::l2) return {s.mean, inverse_root(s.m2, a)};
    const float divisor = l2_divisor<T>(__fsqrt_rn(s.m2), a.n.eps);
    return {divisor, Divisor::of(divisor).reciprocal};
  }
  __device__ static float saved_mean(const Stat& s, RowValues, const RowArgs& a) {
    return a.n.kind == NormKind::l2 ? __fsqrt_rn(s.m2) : s.mean;
  }
};

template <class Policy>
constexpr bool kOptions = Policy::affine == Affine::with_options;

// --- before the norm -----------------------------------------------------------------------------------------------

// The sums of the elements of two vectors, each rounded to T.
template <class T, int V>
__device__ inline uint4 added(const uint4& a, const uint4& b) {
  float x[V], y[V];
  floats_of<T>(a, x);
  floats_of<T>(b, y);
#pragma unroll
  for (int j = 0; j < V; ++j) x[j] = __fadd_rn(x[j], y[j]);
  return words_of<T>(x);
}

// Adds the residual to a settled tile of the chunk at `at` and stores the sum: so many of a lane's vectors at once that the
// others do not lack registers. All lanes of the warp must call.
template <class T, class Tile>
__device__ inline void add_residual_to(Tile& tile, const T* residual, T* sum, const T* end, int64_t at) {
  if constexpr (Tile::Ragged) {
    Tile other;
    other.load(residual + at, tile.len, end);
    other.settle();
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) tile.words[k] = added<T, Tile::V>(tile.words[k], other.words[k]);
    tile.store(sum + at, [&](int k) { return tile.words[k]; });
  } else {
    constexpr int some = 4;
#pragma unroll
    for (int first = 0; first < Tile::Slots; first += some) {
      uint4 other[some] = {};
#pragma unroll
      for (int k = first; k < first + some && k < Tile::Slots; ++k) {
        load_if(tile.inside(k), other[k - first], residual + at + Tile::offset(k));
      }
#pragma unroll
      for (int k = first; k < first + some && k < Tile::Slots; ++k) {
        tile.words[k] = added<T, Tile::V>(tile.words[k], other[k - first]);
        if (tile.inside(k)) store_words(sum + at + Tile::offset(k), tile.words[k]);
      }
    }
  }
}

// The same for the chunk from `begin` on of several rows, where there is a residual.
template <class Policy, class T, class Tile, int Rows>
__device__ inline void add_residual(Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows], int64_t begin) {
  if constexpr (kOptions<Policy>) {
    if (args.n.options.residual == nullptr) return;
    const T* residual = static_cast<const T*>(args.n.options.residual);
    T* sum = static_cast<T*>(args.n.options.sum);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      add_residual_to(tiles[r], residual, sum, residual + args.n.rows * args.n.cols, rows[r] * args.n.cols + begin);
    }
  }
}

// --- behind it -----------------------------------------------------------------------------------------------------

// V values that an element of the row has of its own, of dtype T or float32, or none: asked for by request, so that several
// are under way at once, and then given.
template <class T, int V, bool Ragged>
struct Values {
  static constexpr int vectors = V * 4 / 16;  // of V floats
  uint4 words[vectors];
  bool there, wide;

  __device__ void start(const void* data, DType dtype) {
    there = data != nullptr;
    wide = sizeof(T) == 4 || dtype == DType::f32;
#pragma unroll
    for (int i = 0; i < vectors; ++i) words[i] = {};
  }
  // From index `at` on of `data`, at a multiple of 16 bytes. Ragged: only the first `count` may be read.
  __device__ void request(const void* data, DType dtype, int64_t at, int count) {
    start(data, dtype);
    if constexpr (!Ragged) {
      const char* from = static_cast<const char*>(data) + at * (wide ? 4 : 2);
      load_if(there, words[0], from);
      if constexpr (vectors == 2) load_if(there && wide, words[1], from + 16);
    } else if (there && wide) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) words[i] = load_first(static_cast<const float*>(data) + at + 4 * i, count - 4 * i);
    } else if (there) {
      words[0] = load_first(static_cast<const T*>(data) + at, count);
    }
  }
  // The same from anywhere, element by element where Ragged.
  __device__ void request_anywhere(const void* data, DType dtype, int64_t at, int count) {
    if constexpr (!Ragged) {
      request(data, dtype, at, count);
    } else {
      start(data, dtype);
      float values[V];
#pragma unroll
      for (int j = 0; j < V; ++j) values[j] = there && j < count ? channel_value({data, dtype}, at + j, 0.f) : 0.f;
      wide = true;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        words[i] = {__float_as_uint(values[4 * i]), __float_as_uint(values[4 * i + 1]), __float_as_uint(values[4 * i + 2]),
                    __float_as_uint(values[4 * i + 3])};
      }
    }
  }
  __device__ void give(float absent, float (&to)[V]) const {
    if (!there) {
#pragma unroll
      for (int j = 0; j < V; ++j) to[j] = absent;
    } else if (wide) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        float four[4];
        floats_of<float>(words[i], four);
#pragma unroll
        for (int j = 0; j < 4; ++j) to[4 * i + j] = four[j];
      }
    } else if constexpr (sizeof(T) == 2) {
      floats_of<T>(words[0], to);
    }
  }
};

// Vector k of the tile of the chunk from `begin` on, normalised, scaled and shifted. `sample`: where its row's scale and
// shift begin.
template <class T, class Tile>
__device__ inline void normalised_with_options(const Tile& tile, int k, const RowArgs& args, int64_t begin,
                                               int64_t sample, RowValues row, float (&out)[Tile::V]) {
  constexpr int V = Tile::V;
  const RowNorm& n = args.n;
  const int64_t at = begin + Tile::offset(k);
  const int count = tile.len - Tile::offset(k);
  Values<T, V, Tile::Ragged> weight, bias, scale, shift;
  weight.request(n.weight, n.weight_dtype, at, count);
  bias.request(n.bias, n.weight_dtype, at, count);
  scale.request_anywhere(n.options.scale, n.options.scale_dtype, sample + at, count);
  shift.request_anywhere(n.options.shift, n.options.scale_dtype, sample + at, count);
  floats_of<T>(tile.words[k], out);
  if (n.kind == NormKind::l2) {
    const Divisor by{row.mean, row.rstd};
    if (by.fast()) {
#pragma unroll
      for (int j = 0; j < V; ++j) out[j] = by.template divide<true>(out[j]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) out[j] = by.template divide<false>(out[j]);
    }
    return;
  }
  float w[V], b[V];
  weight.give(1.f, w);
  bias.give(n.kind == NormKind::layer ? 0.f : -0.f, b);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float scaled = __fmul_rn(__fsub_rn(out[j], row.mean), row.rstd);
    out[j] = fmaf(n.cast_before_weight ? rounded<T>(scaled) : scaled, __fadd_rn(w[j], args.weight_offset), b[j]);
  }
  if (!scale.there) return;
  scale.give(0.f, w);
  shift.give(0.f, b);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = fmaf(out[j], __fadd_rn(1.f, w[j]), b[j]);
}

// Rounded to T, then activated.
template <class T, int V>
__device__ inline uint4 activated_words(const float (&values)[V], const ActivationArgs& activation) {
  return activated(Pack<T, V>::of_raw(words_of<T>(values)), activation).raw();
}

// V values as float32 to a multiple of 16 bytes.
template <int V>
__device__ inline void store_wide(float* to, const float (&values)[V], const ActivationArgs& activation) {
#pragma unroll
  for (int i = 0; i < V / 4; ++i) {
    const float four[4] = {values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
    store_words(to + 4 * i, activated_words<float>(four, activation));
  }
}

// Normalise and store the chunk from `begin` on of a row. All lanes of the warp must call. Not wide where Ragged.
template <class T, class Tile>
__device__ inline void store_with_options(const Tile& tile, const RowArgs& args, int64_t row, int64_t begin,
                                          RowValues values) {
  const RowOptions& options = args.n.options;
  const int64_t sample = args.by_sample.of(row) * options.sample_stride, first = row * args.n.cols + begin;
  const auto make = [&](int k, float (&out)[Tile::V]) {
    normalised_with_options<T>(tile, k, args, begin, sample, values, out);
  };
  if constexpr (Tile::Ragged) {
    tile.store(static_cast<T*>(args.n.y) + first, [&](int k) {
      float out[Tile::V];
      make(k, out);
      return activated_words<T>(out, options.activation);
    });
  } else {
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) {
      if (!tile.inside(k)) continue;
      const int64_t at = first + Tile::offset(k);
      float out[Tile::V];
      make(k, out);
      if (sizeof(T) == 2 && options.wide) {
        store_wide(static_cast<float*>(args.n.y) + at, out, options.activation);
      } else {
        store_words(static_cast<T*>(args.n.y) + at, activated_words<T>(out, options.activation));
      }
    }
  }
}

}  // namespace
}  // namespace normswap
