// How the backward of group_norm is cut and who works on it; make_group_backward_plan.h decides.
//
// Contiguous input. A line is a channel of a sample: `spatial` elements, `vectors` vectors, of which `lanes` neighbouring
// lanes take a unit at a time. A piece is several whole lines of a group, or `piece_units` units of a line that is longer. The
// sums are united lane by lane to those of a unit, of a line's units in a piece, of a piece's lines, of a group's pieces:
// a tree that sizes and dtypes fix, whoever works on it. Two ways:
//   held    a block, or a cluster, holds x and dy of whole groups in shared memory: each is read once
//   passing blocks take pieces one after the other, for their sums and later, when those of the group are known and while
//           x and dy still lie in the L2, for the gradients
//
// Channels last. A slab is a strip of whole groups of a sample, a piece so many of its rows; the tree also depends on whether
// there is an activation, whose gradient may take more room than dy. Held: a block has slabs of one
// piece, one after the other; or a block has a piece, a cluster a slab.
#pragma once

#include "plan/plan.h"

namespace normswap {

struct GroupSizes {
  int64_t batch, channels, spatial, num_groups;
  int itemsize, grad_itemsize;  // of x, of dy
  int kept_itemsize;            // channels last: of dy behind the activation, as blocks keep it
};

struct GroupBackwardPlan {
  bool held;
  int vec, lanes, each;  // elements of a vector; lanes that share a unit; vectors that one has of it, at most
  int units;             // of a line
  int piece_lines, piece_units;
  int64_t line_pieces;   // pieces of a line that has several, else 1
  int64_t group_pieces;
  int64_t groups;        // of all samples
  int block_pieces;      // held: that a block has
  int cluster;           // held: blocks of a cluster
  int block_lines;       // held: of which a block has elements, at most
  int64_t block_elements;
  int threads, shared;
  int64_t lag;   // passing: pieces by which the gradients follow the sums
  int64_t grid;
};

constexpr int kRunsAPiece = 16;     // of 32 lanes: units of whole lines
constexpr int kHeldThreads = 512;
constexpr int kPassingThreads = 256;
constexpr int kPassingBlocks = 2;   // of a multiprocessor
constexpr int kBunch = 16;          // channels last: pieces whose sums are united first
constexpr int kSlabThreads = 256, kSmallSlabThreads = 128;  // channels last: of a block, of one that holds a small slab
constexpr int kSlabBlocks = 2;  // of the former, of a multiprocessor
constexpr int kRowsHeld = 16;   // of a thread, at most

// Vectors of x and dy that a lane has at once.
template <int Vec, bool SameSize>
constexpr int kVectorsAtOnce = Vec == 1 ? 8 : SameSize || Vec == 4 ? 4 : 2;

// Pairs of sums for dweight and dbias.
inline int64_t group_line_sums(const GroupBackwardPlan& p, const GroupSizes& s) {
  return s.batch * s.channels * p.line_pieces;
}

// Channels last. A thread has `vec` channels and thread_rows rows of a piece.
struct GroupColumnsPlan {
  int threads;            // of a block
  int vec, width, lanes;  // of a strip: channels (of the last maybe fewer), vectors
  int side, half_rows;    // rows that a block has side by side; of those of a warp the power of two below
  int thread_rows, piece_rows;
  int64_t strips, slabs, pieces, bunches;  // slabs in all; pieces and bunches of a slab
  int held_bytes;  // held: of x and dy, of a block; else 0
  int64_t lag;     // passing: pieces by which the gradients follow the sums
  int shared;
  int blocks;  // passing: at most
  int sum_rows;  // of sums that a block keeps
};

}  // namespace normswap
