// Normalisation with statistics down the columns of (batch, rows, channels) memory: scale -> BatchNorm (batch = 1, a
// group is one channel) and GroupNorm of channels_last tensors (a batch entry a sample, a group several channels).
//
// Columns are cut into strips of `tx * V` channels and rows into `segments` of `segment_rows`, both functions of the
// shape alone; a block of 256 threads takes one strip of one segment: thread (tx, ty) the rows ty, ty + TY, ... of V
// channels, eight rows at a time in registers by two passes, merged by Chan's formula. Segments then merge in a fixed
// order (column_finish), groups of channels too (group_finish), and column_apply walks the tensor backwards, so that
// it begins with what is still in the L2.
#include "reduce.cuh"
#include "vec.cuh"

namespace normswap {
namespace {

// Chan, Golub & LeVeque 1979. `a` precedes `b`.
__device__ inline Moments merge(const Moments& a, const Moments& b) {
  if (b.n == 0.f) return a;
  const float n = __fadd_rn(a.n, b.n);
  const float share = __fdiv_rn(b.n, n);
  const float delta = __fsub_rn(b.mean, a.mean);
  const float between = __fmul_rn(__fmul_rn(delta, delta), __fmul_rn(a.n, share));
  return {fmaf(delta, share, a.mean), __fadd_rn(__fadd_rn(a.m2, b.m2), between), n};
}

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 8;
constexpr int kMaxSegments = 256;
constexpr int kFinishParts = 8;  // threads that share a column's segments

struct ColumnPlan {
  int vec, tx, ty;
  int64_t strips, segments, segment_rows;
};

template <class T>
ColumnPlan make_column_plan(int64_t rows, int64_t channels) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  ColumnPlan p{};
  p.vec = channels % full == 0 ? full : 1;
  const int64_t packs = ceil_div(channels, p.vec);
  p.tx = 32;
  while (p.tx > 1 && p.tx / 2 >= packs) p.tx /= 2;
  p.ty = kThreads / p.tx;
  p.strips = ceil_div(packs, p.tx);
  const int64_t wanted = ceil_div(rows, 2 * kRowsAtOnce * p.ty);
  p.segments = wanted < 1 ? 1 : wanted > kMaxSegments ? kMaxSegments : wanted;
  p.segment_rows = ceil_div(ceil_div(rows, p.segments), p.ty) * p.ty;
  p.segments = ceil_div(rows, p.segment_rows);
  return p;
}

struct ColumnArgs {
  ChannelNorm n;
  ColumnPlan p;
  Moments* partial;  // (batch, segments, channels)
  Moments* column;   // (batch, channels), group_norm only
};

// Where a thread works.
template <class T, int V>
struct Place {
  int64_t batch, segment, channel, first, end;
  int tx, ty;
  __device__ Place(const ColumnArgs& a, int64_t block) {
    const int64_t strip = block % a.p.strips;
    segment = block / a.p.strips % a.p.segments;
    batch = block / a.p.strips / a.p.segments;
    tx = threadIdx.x % a.p.tx;
    ty = threadIdx.x / a.p.tx;
    channel = (strip * a.p.tx + tx) * V;
    first = segment * a.p.segment_rows + ty;
    end = min((segment + 1) * a.p.segment_rows, a.n.rows);
  }
  __device__ int64_t offset(const ColumnArgs& a, int64_t row) const {
    return (batch * a.n.rows + row) * a.n.channels + channel;
  }
};

// Moments of up to kRowsAtOnce values of one column, by two passes.
template <class T, int V>
__device__ inline Moments moments_of(const Pack<T, V> (&packs)[kRowsAtOnce], int j, int count) {
  const float n = static_cast<float>(count);
  float sum = 0.f, m2 = 0.f;
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    if (i < count) sum = __fadd_rn(sum, to_float(packs[i].v[j]));
  }
  const float mean = __fdiv_rn(sum, n);
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    if (i < count) {
      const float d = __fsub_rn(to_float(packs[i].v[j]), mean);
      m2 = fmaf(d, d, m2);
    }
  }
  return {mean, m2, n};
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) column_partial(const ColumnArgs args) {
  __shared__ Moments shared[kThreads * V];
  const Place<T, V> at(args, blockIdx.x);
  const bool inside = at.channel < args.n.channels;
  Moments mine[V] = {};
  const T* x = static_cast<const T*>(args.n.x);
  for (int64_t row = at.first; inside && row < at.end; row += kRowsAtOnce * args.p.ty) {
    const int64_t left = (at.end - row + args.p.ty - 1) / args.p.ty;
    const int count = left < kRowsAtOnce ? static_cast<int>(left) : kRowsAtOnce;
    Pack<T, V> packs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i < count) packs[i] = Pack<T, V>::load_cached(x + at.offset(args, row + i * args.p.ty));
    }
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j] = merge(mine[j], moments_of(packs, j, count));
  }
#pragma unroll
  for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = mine[j];
  for (int stride = 1; stride < args.p.ty; stride *= 2) {
    __syncthreads();
    if (at.ty % (2 * stride) == 0) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        Moments& into = shared[threadIdx.x * V + j];
        into = merge(into, shared[(threadIdx.x + stride * args.p.tx) * V + j]);
      }
    }
  }
  if (inside && at.ty == 0) {
    Moments* out = args.partial + (at.batch * args.p.segments + at.segment) * args.n.channels + at.channel;
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = shared[threadIdx.x * V + j];
  }
}

// Statistics of a scaled column from those of the column: u = s z has mean s mu and variance s^2 var.
__device__ inline void finish_batch_norm(const ChannelNorm& n, int64_t channel, const Moments& column) {
  const float scale = channel_value(n.scale, channel, 1.f);
  const float rows = static_cast<float>(n.rows);
  const float var = scale * scale * __fdiv_rn(column.m2, rows);
  n.mean[channel] = column.mean;
  n.rstd[channel] = rsqrtf(var + static_cast<float>(n.eps));
  const float momentum = static_cast<float>(n.momentum);
  if (n.running_mean.data != nullptr) {
    const float old = channel_value(n.running_mean, channel, 0.f);
    set_channel_value(n.running_mean, channel, (1.f - momentum) * old + momentum * (scale * column.mean));
  }
  if (n.running_var.data != nullptr) {
    const float unbiased = scale * scale * __fdiv_rn(column.m2, static_cast<float>(n.rows - 1));
    const float old = channel_value(n.running_var, channel, 0.f);
    set_channel_value(n.running_var, channel, (1.f - momentum) * old + momentum * unbiased);
  }
}

// Block of 32 columns x kFinishParts: each part merges consecutive segments, then the parts merge in a tree.
template <bool Groups>
__global__ void __launch_bounds__(32 * kFinishParts) column_finish(const ColumnArgs args) {
  __shared__ Moments shared[kFinishParts][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t blocks_a_batch = (args.n.channels + 31) / 32;
  const int64_t batch = blockIdx.x / blocks_a_batch;
  const int64_t channel = blockIdx.x % blocks_a_batch * 32 + lane;
  const bool inside = channel < args.n.channels;
  const int64_t share = (args.p.segments + kFinishParts - 1) / kFinishParts;
  const int64_t end = min((part + 1) * share, args.p.segments);
  Moments mine{};
  for (int64_t segment = part * share; inside && segment < end; ++segment) {
    mine = merge(mine, args.partial[(batch * args.p.segments + segment) * args.n.channels + channel]);
  }
  shared[part][lane] = mine;
  for (int stride = 1; stride < kFinishParts; stride *= 2) {
    __syncthreads();
    if (part % (2 * stride) == 0) shared[part][lane] = merge(shared[part][lane], shared[part + stride][lane]);
  }
  if (!inside || part != 0) return;
  if constexpr (Groups) {
    args.column[batch * args.n.channels + channel] = shared[0][lane];
  } else {
    finish_batch_norm(args.n, channel, shared[0][lane]);
  }
}

// A warp a (sample, group): its channels lane by lane, then a tree over the lanes.
__global__ void __launch_bounds__(kThreads) group_finish(const ColumnArgs args) {
  const int64_t group = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t width = args.n.channels / args.n.num_groups;
  const bool inside = group < args.n.batch * args.n.num_groups;
  Moments mine{};
  for (int64_t c = lane; inside && c < width; c += 32) mine = merge(mine, args.column[group * width + c]);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const Moments other = {__shfl_xor_sync(kWholeWarp, mine.mean, mask), __shfl_xor_sync(kWholeWarp, mine.m2, mask),
                           __shfl_xor_sync(kWholeWarp, mine.n, mask)};
    mine = lane & mask ? merge(other, mine) : merge(mine, other);
  }
  if (!inside || lane != 0) return;
  const float count = static_cast<float>(args.n.rows * width);
  args.n.mean[group] = mine.mean;
  args.n.rstd[group] = rsqrtf(__fdiv_rn(mine.m2, count) + static_cast<float>(args.n.eps));
}

enum class Source { batch, running, group };

// y = (x scale - mean) gain + bias for one channel. In training the scale is part of the gain.
struct ChannelAffine {
  float scale, mean, gain, bias;
  template <Source From>
  __device__ static ChannelAffine of(const ChannelNorm& n, int64_t batch, int64_t channel) {
    const float weight = channel_value(n.weight, channel, 1.f), bias = channel_value(n.bias, channel, 0.f);
    if constexpr (From == Source::group) {
      const int64_t group = batch * n.num_groups + channel / (n.channels / n.num_groups);
      return {1.f, n.mean[group], n.rstd[group] * weight, bias};
    }
    const float scale = channel_value(n.scale, channel, 1.f);
    if constexpr (From == Source::batch) return {1.f, n.mean[channel], scale * n.rstd[channel] * weight, bias};
    const float var = channel_value(n.running_var, channel, 1.f);
    const float rstd = rsqrtf(var + static_cast<float>(n.eps));
    return {scale, channel_value(n.running_mean, channel, 0.f), rstd * weight, bias};
  }
};

template <class T, int V, Source From>
__global__ void __launch_bounds__(kThreads) column_apply(const ColumnArgs args) {
  const Place<T, V> at(args, static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x);
  if (at.channel >= args.n.channels) return;
  ChannelAffine affine[V];
#pragma unroll
  for (int j = 0; j < V; ++j) affine[j] = ChannelAffine::of<From>(args.n, at.batch, at.channel + j);
  const T* x = static_cast<const T*>(args.n.x);
  T* y = static_cast<T*>(args.n.y);
#pragma unroll 4
  for (int64_t row = at.first; row < at.end; row += args.p.ty) {
    Pack<T, V> pack = Pack<T, V>::load(x + at.offset(args, row));
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const ChannelAffine& a = affine[j];
      pack.v[j] = from_float<T>(fmaf(fmaf(to_float(pack.v[j]), a.scale, -a.mean), a.gain, a.bias));
    }
    pack.store(y + at.offset(args, row));
  }
}

// A block a row of the Linear's weight.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) fold_rows(const FoldLinear f) {
  const int64_t channel = blockIdx.x;
  const float rstd = rsqrtf(channel_value(f.running_var, channel, 1.f) + static_cast<float>(f.eps));
  const float gain = rstd * channel_value(f.weight, channel, 1.f);
  const float column = gain * channel_value(f.scale, channel, 1.f);
  if (threadIdx.x == 0) {
    const float shift = fmaf(-gain, channel_value(f.running_mean, channel, 0.f), channel_value(f.bias, channel, 0.f));
    const float bias = fmaf(column, channel_value(f.linear_bias, channel, 0.f), shift);
    static_cast<T*>(f.out_bias)[channel] = from_float<T>(bias);
  }
  const T* in = static_cast<const T*>(f.linear_weight) + channel * f.in_features;
  T* out = static_cast<T*>(f.out_weight) + channel * f.in_features;
  for (int64_t k = threadIdx.x * V; k < f.in_features; k += kThreads * V) {
    Pack<T, V> pack = Pack<T, V>::load(in + k);
#pragma unroll
    for (int j = 0; j < V; ++j) pack.v[j] = from_float<T>(column * to_float(pack.v[j]));
    // Stored for the product that follows: keep it in the L2.
    *reinterpret_cast<typename Pack<T, V>::Raw*>(out + k) = *reinterpret_cast<const typename Pack<T, V>::Raw*>(&pack);
  }
}

// --- launch ------------------------------------------------------------------------------------------------------

template <class T>
ColumnArgs column_args(const ChannelNorm& n) {
  const ColumnPlan p = make_column_plan<T>(n.rows, n.channels);
  Moments* partial = static_cast<Moments*>(n.workspace);
  return {n, p, partial, partial + n.batch * p.segments * n.channels};
}

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

template <class T, int V, Source From>
void launch_apply(const ColumnArgs& a, cudaStream_t stream) {
  column_apply<T, V, From><<<grid_of(a.n.batch * a.p.strips * a.p.segments), kThreads, 0, stream>>>(a);
}

template <class T, int V, Source From>
cudaError_t launch_columns(const ColumnArgs& a, cudaStream_t stream) {
  if (a.n.batch * a.p.strips * a.p.segments > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if constexpr (From != Source::running) {
    column_partial<T, V><<<grid_of(a.n.batch * a.p.strips * a.p.segments), kThreads, 0, stream>>>(a);
    const dim3 columns = grid_of(a.n.batch * ceil_div(a.n.channels, 32));
    column_finish<From == Source::group><<<columns, 32 * kFinishParts, 0, stream>>>(a);
    if constexpr (From == Source::group) {
      group_finish<<<grid_of(ceil_div(a.n.batch * a.n.num_groups, kThreads / 32)), kThreads, 0, stream>>>(a);
    }
  }
  launch_apply<T, V, From>(a, stream);
  return cudaGetLastError();
}

template <class T, Source From>
cudaError_t launch_vec(const ChannelNorm& n, cudaStream_t stream) {
  const ColumnArgs a = column_args<T>(n);
  if (a.p.vec > 1) return launch_columns<T, 16 / static_cast<int>(sizeof(T)), From>(a, stream);
  return launch_columns<T, 1, From>(a, stream);
}

template <Source From>
cudaError_t launch(const ChannelNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_vec<float, From>(n, stream);
    case DType::f16: return launch_vec<__half, From>(n, stream);
    default: return launch_vec<__nv_bfloat16, From>(n, stream);
  }
}

template <class T>
cudaError_t launch_fold(const FoldLinear& f, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  if (f.in_features % full == 0) {
    fold_rows<T, full><<<grid_of(f.channels), kThreads, 0, stream>>>(f);
  } else {
    fold_rows<T, 1><<<grid_of(f.channels), kThreads, 0, stream>>>(f);
  }
  return cudaGetLastError();
}

}  // namespace

int64_t channel_workspace_bytes(const ChannelNorm& n) {
  const ColumnPlan p =
      n.dtype == DType::f32 ? make_column_plan<float>(n.rows, n.channels) : make_column_plan<__half>(n.rows, n.channels);
  return n.batch * (p.segments + 1) * n.channels * static_cast<int64_t>(sizeof(Moments));
}

cudaError_t scale_batch_norm(const ChannelNorm& n, cudaStream_t stream) { return launch<Source::batch>(n, stream); }

cudaError_t affine(const ChannelNorm& n, cudaStream_t stream) { return launch<Source::running>(n, stream); }

cudaError_t group_norm_channels_last(const ChannelNorm& n, cudaStream_t stream) {
  return launch<Source::group>(n, stream);
}

cudaError_t fold_linear(const FoldLinear& f, cudaStream_t stream) {
  switch (f.dtype) {
    case DType::f32: return launch_fold<float>(f, stream);
    case DType::f16: return launch_fold<__half>(f, stream);
    default: return launch_fold<__nv_bfloat16>(f, stream);
  }
}

}  // namespace normswap
