// LayerNorm, RMSNorm and L2 norm with all that may stand before and behind them (RowOptions), chosen at run time: kernels of
// their own for every choice would be hundreds. A norm that stands alone, or behind a residual alone, has such kernels
// (row_policy.cuh); the statistics, and what is normalised, have the same bits here.
#pragma once

#include "device/in_turn.cuh"
#include "row/row_policy.cuh"

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

// Whether rows in such tiles may have a residual: of a norm that stands alone, those that begin and end at vectors.
template <class Policy, class Tile>
constexpr bool kAddsResidual = kOptions<Policy> || (Policy::affine == Affine::by_element && !Tile::Ragged);

// --- before the norm -----------------------------------------------------------------------------------------------

// The sums of the elements of two vectors, each rounded to T; 16-bit ones in pairs, to the bits of their sums as floats.
template <class T>
__device__ inline unsigned added(unsigned a, unsigned b) {
  if constexpr (sizeof(T) == 2) {
    return added_pairs<T>(a, b);
  } else {
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
  }
}
template <class T>
__device__ inline uint4 added(const uint4& a, const uint4& b) {
  return {added<T>(a.x, b.x), added<T>(a.y, b.y), added<T>(a.z, b.z), added<T>(a.w, b.w)};
}

// Four values of 16 bits, two in each of the first two words, as float32.
__device__ inline uint4 widened(const uint4& halves, DType dtype) {
  float values[8];
  if (dtype == DType::f16) {
    floats_of<Half>(halves, values);
  } else {
    floats_of<BFloat16>(halves, values);
  }
  return words_of<float>({values[0], values[1], values[2], values[3]});
}

// As load_if, of 8 bytes.
__device__ inline void load_pair_if(bool there, uint4& words, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n\t}"
               : "+r"(words.x), "+r"(words.y)
               : "l"(p), "r"(static_cast<int>(there)));
}

// A lane's vectors of a chunk of 16 bits, which begins at a multiple of 8 bytes, beside a tile of float32: for `widened`.
template <class Tile>
__device__ inline void load_halves(Tile& tile, const uint16_t* chunk, int length) {
  tile.len = length;
#pragma unroll
  for (int k = 0; k < Tile::Slots; ++k) {
    tile.words[k] = {};
    load_pair_if(tile.inside(k), tile.words[k], chunk + Tile::offset(k));
  }
}

// Settles tiles of the chunk from `begin` on of several rows; where there is a residual adds it and stores the sums. Mixed: it
// may be of 16 bits beside float32 (adds_mixed). All lanes of the warp must call.
template <class T, bool Mixed, class Tile, class Row, int Rows>
__device__ inline void add_residual(Tile (&tiles)[Rows], const RowArgs& args, const Row (&rows)[Rows], int64_t begin) {
#pragma unroll
  for (Tile& tile : tiles) tile.settle();
  const RowOptions& options = args.n.options;
  if (options.residual == nullptr) return;
  const T* residual = static_cast<const T*>(options.residual);
  const T* end = residual + args.n.rows * args.n.cols;
  T* sum = static_cast<T*>(options.sum) + begin;
  const bool mixed = Mixed && sizeof(T) == 4 && !Tile::Ragged && options.residual_dtype != DType::f32;
  Tile others[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const int64_t at = rows[r] * args.n.cols + begin;
    if (mixed) {
      load_halves(others[r], static_cast<const uint16_t*>(options.residual) + at, tiles[r].len);
    } else {
      others[r].load(residual + at, tiles[r].len, end);
    }
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    others[r].settle();
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) {
      const uint4& other = others[r].words[k];
      tiles[r].words[k] = added<T>(tiles[r].words[k], mixed ? widened(other, options.residual_dtype) : other);
    }
    tiles[r].store(sum + rows[r] * args.n.cols, [&](int k) { return tiles[r].words[k]; });
  }
}

// --- behind it -----------------------------------------------------------------------------------------------------

// What stands for a bias that is absent where zeros would make +0 of -0.
template <class W>
constexpr unsigned kMinus = std::is_same_v<W, float> ? 0x80000000u : 0x80008000u;
template <class W>
__device__ const uint4 kMinusZeros[2] = {{kMinus<W>, kMinus<W>, kMinus<W>, kMinus<W>}, {kMinus<W>, kMinus<W>, kMinus<W>, kMinus<W>}};

// V values from `from` on, which are at a multiple of 16 bytes.
template <class W, int V>
__device__ inline void load_vectors(const W* from, float (&to)[V]) {
  constexpr int per = 16 / static_cast<int>(sizeof(W));
#pragma unroll
  for (int i = 0; i < V / per; ++i) {
    float some[per];
    floats_of<W>(__ldg(reinterpret_cast<const uint4*>(from) + i), some);
#pragma unroll
    for (int j = 0; j < per; ++j) to[i * per + j] = some[j];
  }
}

// The same, of which only the first `count` may be read, with zeros behind them; Anywhere: `from` is at no such multiple.
template <bool Anywhere, class W, int V>
__device__ inline void load_some(const W* from, int count, float (&to)[V]) {
  if constexpr (Anywhere) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = j < count ? to_float(from[j]) : 0.f;
  } else {
    Parameters<W, V> parameters;
    Floats<V> floats;
    parameters.load_some(from, count);
    parameters.floats(floats);
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = floats.v[j];
  }
}

// Two vectors of which an element of the row has a value each, of one dtype, T or float32.
struct TwoVectors {
  const void* first;
  const void* second;
  DType dtype;
  int64_t at;  // where this lane's values begin

  // Both at once, so that one does not wait for the other. An absent first is ones, an absent second zeros, or -0.
  // Ragged: only the first `count` values may be read. Anywhere: these then begin at no multiple of 16 bytes.
  template <class T, bool Ragged, bool Anywhere, int V>
  __device__ void load(int count, bool minus, float (&a)[V], float (&b)[V]) const {
    if (sizeof(T) == 2 && dtype == DType::f32) return load_as<float, Ragged, Anywhere>(count, minus, a, b);
    load_as<T, Ragged, Anywhere>(count, minus, a, b);
  }

 private:
  template <class W, bool Ragged, bool Anywhere, int V>
  __device__ void load_as(int count, bool minus, float (&a)[V], float (&b)[V]) const {
    const W* one = first != nullptr ? static_cast<const W*>(first) + at : reinterpret_cast<const W*>(kOnes<W>.vectors);
    const uint4* absent = minus ? kMinusZeros<W> : kZeros.vectors;
    const W* other = second != nullptr ? static_cast<const W*>(second) + at : reinterpret_cast<const W*>(absent);
    if constexpr (Ragged) {
      load_some<Anywhere>(one, count, a);
      load_some<Anywhere>(other, count, b);
    } else {
      load_vectors(one, a);
      load_vectors(other, b);
    }
  }
};

// A vector, normalised, scaled and shifted: the one at `at` of its row, of which `count` elements are there. `sample`: where
// its row's scale and shift begin.
template <class T, bool ragged, int V>
__device__ inline void normalised_with_options(const uint4& words, const RowArgs& args, int64_t at, int count,
                                               int64_t sample, RowValues row, float (&out)[V]) {
  const RowNorm& n = args.n;
  const RowOptions& options = n.options;
  floats_of<T>(words, out);
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
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out[j] = __fmul_rn(__fsub_rn(out[j], row.mean), row.rstd);
    if (sizeof(T) == 2 && n.cast_before_weight) out[j] = rounded<T>(out[j]);
  }
  float factor[V], term[V];
  if (n.weight != nullptr || n.bias != nullptr) {
    const TwoVectors affine{n.weight, n.bias, n.weight_dtype, at};
    affine.load<T, ragged, false>(count, n.kind != NormKind::layer, factor, term);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = fmaf(out[j], __fadd_rn(factor[j], args.weight_offset), term[j]);
  }
  if (options.scale == nullptr) return;
  const TwoVectors adaptive{options.scale, options.shift, options.scale_dtype, sample + at};
  adaptive.load<T, ragged, ragged>(count, false, factor, term);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = fmaf(out[j], __fadd_rn(1.f, factor[j]), term[j]);
}

// Rounded to T, then activated.
template <class T, int V>
__device__ inline uint4 activated_words(const float (&values)[V], const ActivationArgs& activation) {
  return activated(Pack<T, V>::of_raw(words_of<T>(values)), activation).raw();
}

// Normalise and store the chunk from `begin` on of a row. All lanes of the warp must call. Not wide where Ragged.
template <class T, class Tile>
__device__ inline void store_with_options(const Tile& tile, const RowArgs& args, int64_t row, int64_t begin,
                                          RowValues values) {
  const RowOptions& options = args.n.options;
  [[maybe_unused]] const bool wide = sizeof(T) == 2 && args.n.out_dtype == DType::f32;
  const int64_t sample = args.by_sample.of(row) * options.sample_stride, first = row * args.n.cols + begin;
  const auto make = [&](int offset, const uint4& words, float (&out)[Tile::V]) {
    normalised_with_options<T, Tile::Ragged>(words, args, begin + offset, tile.len - offset, sample, values, out);
  };
  if constexpr (Tile::Ragged) {
    uint4 made[Tile::Slots];
    in_turn(tile, made, [&](int offset, const uint4& words) {
      float out[Tile::V];
      make(offset, words, out);
      return activated_words<T>(out, options.activation);
    });
    tile.store(static_cast<T*>(args.n.y) + first, [&](int k) { return made[k]; });
  } else {
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) {
      const bool there = tile.inside(k);
      const int64_t at = first + Tile::offset(k);
      float out[Tile::V] = {};
      if (there) make(Tile::offset(k), tile.words[k], out);
      if constexpr (sizeof(T) == 2) {
        if (wide) {
          const Halves halves(out, there);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            store_if(halves.there[i], static_cast<float*>(args.n.y) + at + halves.where[i],
                     activated_words<float>(halves.values[i], options.activation));
          }
          continue;
        }
      }
      if (there) store_words(static_cast<T*>(args.n.y) + at, activated_words<T>(out, options.activation));
    }
  }
}

}  // namespace
}  // namespace normswap
