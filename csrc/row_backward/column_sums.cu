// The second stage of dweight and dbias: partial sums of pieces of the rows, added in an order that the number of pieces
// decides.
#include "device/launch.h"
#include "device/vec.cuh"
#include "row_backward/row_backward.h"

namespace normswap {
namespace {

constexpr int kColumnsABlock = 32, kLanesAColumn = 16;

struct ColumnSums {
  const float* partials;  // (pieces, 2, cols)
  ChannelVector to[2];    // absent: not asked for
  int64_t pieces, cols;
};

// Lane y of a column adds pieces y, y + 16, ...; then a binary tree over the lanes.
__global__ void __launch_bounds__(kColumnsABlock* kLanesAColumn) column_sums(const ColumnSums args) {
  __shared__ float sums[kLanesAColumn][kColumnsABlock];
  follow_predecessor();
  let_successor_start();
  const int x = threadIdx.x % kColumnsABlock, y = threadIdx.x / kColumnsABlock, which = blockIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnsABlock + x;
  if (args.to[which].data == nullptr) return;
  float sum = 0.f;
  if (column < args.cols) {
#pragma unroll 8
    for (int64_t piece = y; piece < args.pieces; piece += kLanesAColumn) {
      sum = __fadd_rn(sum, args.partials[(piece * 2 + which) * args.cols + column]);
    }
  }
  sums[y][x] = sum;
  for (int stride = 1; stride < kLanesAColumn; stride *= 2) {
    __syncthreads();
    if (y % (2 * stride) == 0) sums[y][x] = __fadd_rn(sums[y][x], sums[y + stride][x]);
  }
  if (y == 0 && column < args.cols) set_channel_value(args.to[which], column, sums[0][x]);
}

}  // namespace

cudaError_t add_column_sums(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  const ColumnSums args{n.partials, {n.dweight, n.dbias}, plan.pieces, n.cols};
  const dim3 grid(static_cast<unsigned>(ceil_div(n.cols, kColumnsABlock)), n.dbias.data == nullptr ? 1 : 2);
  return launch_block<column_sums>(args, {grid, kColumnsABlock * kLanesAColumn, 0, 1, plan.overlap}, stream);
}

}  // namespace normswap
