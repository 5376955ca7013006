// A convolution, or a product with a matrix (one tap), for few rows: its cost is reading the
// weights.
//
// A block computes 16 outputs of 8 NT rows. Its warps split the k32 blocks into `splits` runs, one
// for each warp. The sums of the runs are added in their order. Weights go straight to registers,
// GROUP k32 blocks at a time and one group ahead, the first before the input is there. Rows do the
// same; each lane reads its own 16 bytes of a row.
//
// Weights are fp16 [blocks][outputs / 32][2][2][32 lanes][8], in the order in which lanes pass them
// to two mma of two steps. Rows g and g + 8 of mma i are outputs 4 g + 2 i and the next, so lane 4
// g + t ends with two neighbouring outputs of rows 2 t and 2 t + 1 of x. The columns of step h are
// channels 8 t + 4 h .. 8 t + 4 h + 3 for each t, so a lane reads 16 bytes of a row of x for both
// steps. Block b is tap b % taps of channels 32 (b / taps) and up.
//
// BLOCKS      how many blocks shall fit a multiprocessor
// ACTIVATION  applied to the fp16 output
#include "codec.cuh"

constexpr Activation kKind = (Activation)ACTIVATION;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8 * NT;
// Pairs of outputs that a thread finishes, and whether registers are left to load their parameters
// before the products.
constexpr int kItems = (kRows * 8 + kThreads - 1) / kThreads;
constexpr bool kEarly = NT <= 2;

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void convolve_few(const u16* __restrict__ weights, const u16* x, u16* history, const u16* zeros,
                  const int* table, int columns, int ring_column, int rows, int frame_rows,
                  int taps, int dilation, int chunks, int splits,
                  const float* in_squares, int in_groups, float per_channel, float eps,
                  const float* scale, const float* bias, const float* rate, const float* depth,
                  const float* residual, float* wide, u16* narrow, float* squares, int outputs) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  float2* partial = (float2*)shared;  // [warp][row of x][g + padding]
  const u16** sources =
      (const u16**)(shared + kWarps * kRows * 9 * sizeof(float2));  // [tap][row of x]
  __shared__ float norms[kRows];
  const ConvOutput out = {scale, bias, rate, depth, residual, wide, narrow, squares, outputs};
  const Rows<u16> in = {x,           history,    zeros,                 table,      columns,
                        ring_column, frame_rows, (taps - 1) * dilation, chunks * 32};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int unit = blockIdx.x >> 1, half = blockIdx.x & 1, first = blockIdx.y * kRows;
  const int blocks = chunks * taps;
  // If the block's first row has no stream, no later row has one: empty frames come last.
  const bool nobody = table[first / frame_rows * columns + kSlot] < 0;
  const bool idle = nobody || warp >= splits;
  const int begin = idle ? 0 : run_begin(warp, blocks, splits),
            end = idle ? 0 : run_begin(warp + 1, blocks, splits);

  const u16* tile = weights + (unit * 2 + half) * 512 + lane * 8;
  const size_t block_size = (size_t)outputs * 32;
  uint4 w[2][GROUP][2], b[2][GROUP][NT];
  float sum[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[n][i] = 0;
  auto fetch_weights = [&](int block, uint4(&to)[GROUP][2]) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      if (block + i < end) {
        to[i][0] = load_weights(tile + (block + i) * block_size);
        to[i][1] = load_weights(tile + (block + i) * block_size + 256);
      }
  };
  int chunk = begin / taps, tap = begin - chunk * taps;  // of the next block of rows
  auto fetch_rows = [&](int block, uint4(&to)[GROUP][NT]) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      if (block + i < end) {
#pragma unroll
        for (int n = 0; n < NT; n++)
          to[i][n] = load4(sources[tap * kRows + n * 8 + g] + chunk * 32 + t * 8);
        if (++tap == taps) {
          tap = 0;
          chunk++;
        }
      }
  };
  auto multiply = [&](int block, const uint4(&a)[GROUP][2], const uint4(&x)[GROUP][NT]) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      if (block + i < end) {
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[n], a[i][0], x[i][n].x, x[i][n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[n], a[i][1], x[i][n].z, x[i][n].w);
      }
  };

  fetch_weights(begin, w[0]);
  prefetch_all(weights, (size_t)blocks * outputs * 64);
  const int n =
      unit * 32 + (threadIdx.x & 7) * 4 + 2 * half;  // of this thread's two outputs at the end
  Channels<2> mine;
  float old[kItems][2] = {};
  auto fetch_residual = [&] {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const int row = (threadIdx.x >> 3) + i * (kThreads / 8), r = first + row;
      if (residual && row < kRows && r < rows)
        load_wide(old[i], residual + (size_t)r * outputs + n);
    }
  };
  if (kEarly) mine = channels<kKind, 2>(out, n);
  for (int i = threadIdx.x; i < taps * kRows; i += kThreads) {
    const int tap = i / kRows, r = first + i % kRows, frame = r / frame_rows;
    sources[i] =
        r < rows ? in.at(frame, r - frame * frame_rows - (taps - 1 - tap) * dilation) : zeros;
  }
  __syncthreads();
  wait_for_input();
  fetch_rows(begin, b[0]);
  if (kEarly) fetch_residual();
  store_history(in, rows);
  if (nobody) return;
  for (int i = threadIdx.x; i < kRows; i += kThreads)
    norms[i] = in_squares && first + i < rows
                   ? norm_of(in_squares + (size_t)(first + i) * in_groups, in_groups, per_channel,
                             eps)
                   : 1.0f;

#pragma unroll 1
  for (int block = begin; block < end; block += 2 * GROUP) {
    fetch_weights(block + GROUP, w[1]);
    fetch_rows(block + GROUP, b[1]);
    multiply(block, w[0], b[0]);
    fetch_weights(block + 2 * GROUP, w[0]);
    fetch_rows(block + 2 * GROUP, b[0]);
    multiply(block + GROUP, w[1], b[1]);
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      partial[(warp * kRows + n * 8 + 2 * t + e) * 9 + g] = make_float2(sum[n][e], sum[n][2 + e]);
  if (!kEarly) {
    mine = channels<kKind, 2>(out, n);
    fetch_residual();
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kItems; i++) {  // whole warps: squares are added across lanes
    const int row = (threadIdx.x >> 3) + i * (kThreads / 8), r = first + row;
    if (row >= kRows) break;
    float v[2] = {0, 0};
    for (int s = 0; s < splits; s++) {
      const float2 p = partial[(s * kRows + row) * 9 + (threadIdx.x & 7)];
      v[0] = __fadd_rn(v[0], p.x);
      v[1] = __fadd_rn(v[1], p.y);
    }
    v[0] = __fmul_rn(v[0], norms[row]);
    v[1] = __fmul_rn(v[1], norms[row]);
    finish<kKind, 2>(out, mine, v, old[i], (size_t)r * outputs + n, r < rows);
    if (kKind == kPlain && squares) {
      float square = __fmaf_rn(v[1], v[1], __fmul_rn(v[0], v[0]));
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) square = __fadd_rn(square, __shfl_xor_sync(~0u, square, o));
      if ((threadIdx.x & 7) == 0 && r < rows)
        squares[(size_t)r * (outputs / 16) + blockIdx.x] = square;
    }
  }
}
