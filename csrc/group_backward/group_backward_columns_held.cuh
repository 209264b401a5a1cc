// The backward of group_norm of channels_last tensors where a block, or a cluster, holds a slab: x and dy are read once.
// Every vector lies in shared memory where the thread that works on it had it copied to. Sums are added as in passing.
#pragma once

#include "group_backward/group_backward_columns.cuh"

namespace normswap {
namespace {

// A thread's vectors of the piece that its block holds, and some of the residual in registers. Those of the block's next
// piece are on their way to the same places as soon as the gradients of these are stored.
template <class T_, class D_, int V, Behind B>
struct HeldColumns : ColumnPlace<V> {
  using T = T_;
  using D = D_;
  using Place = ColumnPlace<V>;
  using Residual = ResidualHere<D, V>;
  using Place::a, Place::at, Place::left, Place::step;
  using Kept = std::conditional_t<B == Behind::any, float, D>;  // g: dy or 0 behind a ReLU
  static constexpr int OfX = Raw<T, V>::words, OfDy = Raw<D, V>::words, Words = OfX + Raw<Kept, V>::words;
  static constexpr int Each = 4, Batches = kRowsHeld / Each;  // work on the first starts while others are on their way
  uint4* const memory;
  const int threads;
  uint4* next;
  int64_t at_next = 0;  // of the next piece: as at, left
  int left_next = 0;
  Raw<D, V> residual[B == Behind::nothing ? 1 : Each];

  __device__ HeldColumns(const ColumnsArgs& args, char* shared)
      : Place(args), memory(reinterpret_cast<uint4*>(shared) + threadIdx.x), threads(args.p.threads) {}
  // Which piece is the next.
  __device__ void aim_at(const SlabPiece& of) { this->start(of, at_next, left_next); }
  // Starts with its copies.
  __device__ void stage() {
    for (int i = 0; i < Batches; ++i) stage_batch(i);
  }
  // Goes to a piece that was staged, and starts with the residual.
  __device__ void begin(const SlabPiece& of) {
    this->go_to(of);
    begin_residual();
    next = memory;
  }
  __device__ void begin_again(const SlabPiece& of) {
    this->go_to(of);
    next = memory;
  }
  // As ColumnVectors'. Last: all have arrived, and give way to the next piece's.
  template <bool Last, class With>
  __device__ void for_each(With with) {
#pragma unroll 1
    for (int i = 0; i < Batches; ++i, left -= Each) {
      if constexpr (!Last) wait_for(Batches - 1 - i);
#pragma unroll
      for (int k = 0; k < Each; ++k) {
        if (k >= left) break;
        float values[V], g[V];
        take<Raw<T, V>>(0).floats(values);
        if constexpr (Last) {
          take<Raw<Kept, V>>(OfX).floats(g);
        } else {
          take<Raw<D, V>>(OfX).floats(g);
        }
        const Raw<D, V> more = residual[B == Behind::nothing ? 0 : k];
        if (!Last && k + Each < left) load_residual(k, at + Each * step);
        with(values, g, Residual{more}, at);
        at += step;
        next += Words * threads;
      }
      if constexpr (Last) stage_batch(i);
    }
  }
  // g in the place of dy, of the vector that for_each is at.
  __device__ void keep(const float (&g)[V]) {
    const auto raw = Raw<Kept, V>::of(g);
#pragma unroll
    for (int w = 0; w < Words - OfX; ++w) next[(OfX + w) * threads] = raw.v[w];
  }
  static constexpr bool Keeps = true;

 private:
  // A vector of what for_each is at.
  template <class Vector>
  __device__ Vector take(int first) const {
    Vector vector;
#pragma unroll
    for (int w = 0; w < Vector::words; ++w) vector.v[w] = next[(first + w) * threads];
    return vector;
  }
  __device__ void stage_batch(int i) {
    uint4* to = memory + i * Each * Words * threads;
    for (int k = 0; k < Each && left_next > 0; ++k, --left_next) {
      copy(to, static_cast<const T*>(a.n.x) + at_next, OfX);
      copy(to + OfX * threads, static_cast<const D*>(a.n.dy) + at_next, OfDy);
      at_next += step;
      to += Words * threads;
    }
    end_batch();
  }
  __device__ void load_residual(int k, int64_t from) {
    if constexpr (B != Behind::nothing) {
      if (a.n.residual != nullptr) residual[k] = Raw<D, V>::load(static_cast<const D*>(a.n.residual) + from);
    }
  }
  __device__ void begin_residual() {
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      if (k < left) load_residual(k, at + k * step);
    }
  }
  __device__ void copy(uint4* to, const void* from, int words) const {
    for (int i = 0; i < words; ++i) copy_async(to + i * threads, static_cast<const uint4*>(from) + i);
  }
  __device__ static void wait_for(int newest) {
    switch (newest) {
      case 3: wait_for_all_but<3>(); break;
      case 2: wait_for_all_but<2>(); break;
      case 1: wait_for_all_but<1>(); break;
      default: wait_for_all_but<0>();
    }
  }
};

// The sums of the slab from its pieces', a channel a thread, in the order of unite_slab: each block of the cluster gets all.
__device__ inline void unite_cluster(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared,
                                     const Inbox& inbox) {
  float2* const of_pieces = shared.sums + a.p.sum_rows * a.p.width;  // (pieces, width)
  cluster_wait();  // every block runs
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    const float2 sums = shared.sums[c];
    for (int to = 0; to < a.pieces; ++to) send_to_block(of_pieces + of.piece * a.p.width + c, inbox, to, sums);
  }
  inbox.wait();
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    float2 sums = of_pieces[c];
    for (int i = 1; i < a.pieces; ++i) sums = plus(sums, of_pieces[i * a.p.width + c]);
    shared.sums[c] = sums;
  }
  __syncthreads();
}

// Slabs of one piece one after the other; in a cluster a block has but one piece.
template <class T, class D, int V, Behind B>
__global__ void __launch_bounds__(kSlabThreads, kSlabBlocks) group_columns_held(const ColumnsArgs args) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Inbox inbox;
  const ColumnsShared shared(args, reinterpret_cast<float*>(memory));
  HeldColumns<T, D, V, B> vectors(args, memory + args.p.shared - args.p.held_bytes);
  const int items = args.slabs * args.pieces, step = static_cast<int>(gridDim.x);
  const auto piece_of = [&](int item) {
    const int slab = args.by_pieces.quotient(item);
    return SlabPiece(args, Turn{false, slab, item - slab * args.pieces});
  };
  int item = static_cast<int>(blockIdx.x);
  follow_predecessor();
  let_successor_start();
  if (args.pieces > 1) {
    const int bytes = args.pieces * piece_of(item).width * static_cast<int>(sizeof(float2));
    if (threadIdx.x < 32) inbox.open(bytes);
    cluster_arrive_with_inboxes();  // waited for in unite_cluster
  }
  vectors.aim_at(piece_of(item));
  vectors.stage();
  for (; item < items; item += step) {
    const SlabPiece of = piece_of(item);
    vectors.begin(of);
    load_line_values(args, of, shared);
    __syncthreads();
    piece_sums<B>(args, of, shared, vectors, [] {});
    if (args.pieces > 1) unite_cluster(args, of, shared, inbox);
    finish_slab(args, of, shared, of.piece == 0, keep_values(args, shared));
    if (item + step < items) vectors.aim_at(piece_of(item + step));
    if (args.gradients) {
      vectors.begin_again(of);
      piece_gradients<B>(args, shared, vectors);
    } else {
      vectors.stage();
    }
    __syncthreads();
  }
}

// --- launch --------------------------------------------------------------------------------------------------------

inline ColumnsArgs columns_args(const GroupBackward& n, const GroupColumnsPlan& p) {
  const GroupSizes& s = n.sizes;
  ColumnsArgs a{};
  a.run = 1;
  a.n = n;
  a.p = p;
  a.group_width = static_cast<int>(s.channels / s.num_groups);
  while (a.run < a.group_width && a.run < 32) a.run *= 2;
  a.pieces = static_cast<int>(p.pieces);
  a.bunches = static_cast<int>(p.bunches);
  a.slabs = static_cast<int>(p.slabs);
  a.by_pieces = Divider::by(a.pieces);
  a.by_strips = Divider::by(p.strips);
  a.by_group_width = Divider::by(a.group_width);
  a.lag = static_cast<int>(p.lag);
  a.gradients = n.dx != nullptr || n.dresidual != nullptr;
  a.tickets = a.slabs * a.pieces * (a.gradients && a.pieces > 1 ? 2 : 1);
  a.reciprocal = 1.f / static_cast<float>(s.spatial * a.group_width);
  a.values = static_cast<float2*>(n.workspace);
  float2* room = a.values + s.batch * s.num_groups;
  if (n.dweight.data != nullptr || n.dbias.data != nullptr) {
    a.line_sums = room;
    room += s.batch * s.channels;
  }
  a.piece_sums = room;
  a.bunch_sums = a.piece_sums + p.slabs * p.pieces * p.width;
  a.ticket = reinterpret_cast<unsigned*>(a.bunch_sums + p.slabs * p.bunches * p.width);
  a.arrived = a.ticket + 1;
  a.bunch_arrived = a.arrived + p.slabs * p.bunches;
  a.ready = a.bunch_arrived + p.slabs;
  return a;
}

template <class T, class D, int V, Behind B>
cudaError_t launch_columns_held(const ColumnsArgs& a, bool overlap, cudaStream_t stream) {
  const LaunchShape shape{grid_of(a.p.blocks), a.p.threads, a.p.shared, a.pieces, overlap};
  return launch_block<group_columns_held<T, D, V, B>>(a, shape, stream);
}

template <class T, class D, int V, Behind B>
cudaError_t launch_columns_passing(const ColumnsArgs& a, cudaStream_t stream) {
  const int64_t flags = 1 + a.p.slabs * (a.p.bunches + 2);
  const cudaError_t error = cudaMemsetAsync(a.ticket, 0, flags * sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{grid_of(a.tickets < a.p.blocks ? a.tickets : a.p.blocks), a.p.threads, a.p.shared, 1, false};
  return launch_block<group_columns<T, D, V, B>>(a, shape, stream);
}

template <class T, class D, int V>
cudaError_t launch_columns_backward(const ColumnsArgs& a, bool overlap, cudaStream_t stream) {
  const Activation behind = a.n.activation.code;
  if constexpr (V > 1) {
    if (a.p.held_bytes > 0) {
      return behind == Activation::none   ? launch_columns_held<T, D, V, Behind::nothing>(a, overlap, stream)
             : behind == Activation::relu ? launch_columns_held<T, D, V, Behind::relu>(a, overlap, stream)
                                          : launch_columns_held<T, D, V, Behind::any>(a, overlap, stream);
    }
    if (behind == Activation::none) return launch_columns_passing<T, D, V, Behind::nothing>(a, stream);
  }
  return launch_columns_passing<T, D, V, Behind::any>(a, stream);
}

template <class T, class D>
cudaError_t group_columns_of(const GroupBackward& n, const GroupColumnsPlan& p, bool overlap, cudaStream_t stream) {
  const ColumnsArgs args = columns_args(n, p);
  cudaError_t error = p.vec == 1 ? launch_columns_backward<T, D, 1>(args, overlap, stream)
                                 : launch_columns_backward<T, D, 16 / static_cast<int>(sizeof(T))>(args, overlap, stream);
  if (error == cudaSuccess) error = launch_sum_lines(n, args.line_sums, 1, overlap, stream);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace
}  // namespace normswap
