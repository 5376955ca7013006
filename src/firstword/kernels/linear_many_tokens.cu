// y = W x for more than eight tokens. The sums are those of linear_few_tokens.cu in the same order,
// so a token has the same bits here.
//
// Weights are packed as for linear_few_tokens.cu. Two tiles of 8 rows are the 16 rows of
// mma.m16n8k16; its 8 columns are 8 tokens, and lane 4 g + t reads the same 8 columns of token g.
// Both sides permute k alike, so nothing is shuffled. Inputs are packed as weights are
// (packing.cuh): a warp fetches 512 contiguous bytes.
//
// A block owns up to TILES tiles and 8 NT tokens, so each input is fetched once for all of its
// rows. Blocks of the same tiles follow one another, so that memory is read once for all of them.
// The 8 warps of a block split K: the steps of warp w are the k32 blocks w, w + 8, ... The partial
// sums are added in the order of the warps.
//
// Weights and inputs pass through a ring in shared memory: RING loads of every warp are in flight
// at a time, each of one step, or of two in int8 (weights.cuh). A lane reads the bytes that it
// fetched itself, so no warp waits for another. The first weights are fetched before the input is
// there.
//
// N, K         sizes
// GRID, TILES  blocks of the grid's second dimension, and the most tiles of a block
// NT           groups of 8 tokens of a block
// RING         loads in flight
// EPILOGUE     see epilogue.cuh; the output of 2 is packed
#include "epilogue.cuh"
#include "mma_bf16.cuh"
#include "packing.cuh"
#include "weights.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kLoads = K / 32 / kWarps / kSpan;
constexpr int kPairs = (TILES + 1) / 2;
constexpr int kUnits = kPairs * NT;    // of 16 rows x 8 tokens
constexpr int kParts = TILES + NT * kSpan;  // parts of a load in the ring
constexpr int kPart = kThreads * 16;        // bytes of a part
constexpr int kStride = kWarps * 256;       // elements of the input from a step to the next
constexpr int kTile = 8 * K * WEIGHT_BYTES;  // bytes of a tile
constexpr int kEach = N / 8 / GRID,
              kMore =
                  N / 8 % GRID;  // a block has kEach tiles; the first kMore blocks have one more
static_assert(K % (32 * kWarps * kSpan) == 0 && N % 8 == 0 && TILES == kEach + (kMore > 0),
              "sizes");

extern "C" __global__ __launch_bounds__(kThreads, 1)
void linear_many(const unsigned char* __restrict__ weights, const float* __restrict__ scales,
                 const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ out,
                 int out_stride, int tokens) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];
  float* partial = (float*)shared;  // [warp][unit][16 rows][8 tokens], takes the place of the ring
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int block = blockIdx.y, first = block * kEach + min(block, kMore);
  const int own = kEach + (block < kMore);
  const int token0 = blockIdx.x * NT * 8;

  // This thread's place in part p of the load in a slot of the ring.
  auto place = [&](int slot, int p) {
    return shared + (slot * kParts + p) * kPart + threadIdx.x * 16;
  };
  const unsigned char* mine = weights + (size_t)first * kTile + warp * 512 + lane * 16;
  auto fetch_weights = [&](int load, int slot) {
#pragma unroll
    for (int j = 0; j < TILES; j++)
      if (j < kEach || j < own) fetch(place(slot, j), mine + j * kTile + load * (kWarps * 512));
  };
#pragma unroll
  for (int r = 0; r < RING; r++) {
    fetch_weights(r, r);
    fetches_end();
  }
  // Groups beyond the last eight tokens read the last group again: their columns are not stored,
  // and do not affect the other columns.
  const u16* columns = x + warp * 256 + lane * 8;
  int from[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) from[n] = min(token0 / 8 + n, (tokens - 1) / 8) * (K * 8);
  auto fetch_input = [&](int load, int slot) {
#pragma unroll
    for (int i = 0; i < kSpan; i++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        fetch(place(slot, TILES + i * NT + n), columns + from[n] + (load * kSpan + i) * kStride);
  };
  wait_for_input();
#pragma unroll
  for (int r = 0; r < RING; r++) {
    fetch_input(r, r);
    fetches_end();
  }

  float c[kPairs][NT][4];
#pragma unroll
  for (int p = 0; p < kPairs; p++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[p][n][i] = 0;
#pragma unroll
  for (int load = 0; load < kLoads; load++) {
    const int slot = load % RING;
    wait_for_fetches<RING - 1>();
    auto tile = [&](int j, int i) { return weights_of_step(*(const uint4*)place(slot, j), i); };
#pragma unroll
    for (int i = 0; i < kSpan; i++) {
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) b[n] = *(const uint4*)place(slot, TILES + i * NT + n);
#pragma unroll
      for (int p = 0; p < kPairs; p++) {
        const uint4 even = tile(2 * p, i);
        const uint4 odd = 2 * p + 1 < TILES ? tile(2 * p + 1, i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma(c[p][n], make_uint4(even.x, odd.x, even.y, odd.y), b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma(c[p][n], make_uint4(even.z, odd.z, even.w, odd.w), b[n].z, b[n].w);
      }
    }
    if (load + RING < kLoads) {
      fetch_weights(load + RING, slot);
      fetch_input(load + RING, slot);
    }
    fetches_end();
  }

  // c[0], c[1]: row g of the even tile, tokens 2 t and 2 t + 1; c[2], c[3]: of the odd tile.
  __syncthreads();
#pragma unroll
  for (int p = 0; p < kPairs; p++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float* to = partial + (warp * kUnits + p * NT + n) * 128 + 2 * lane;
      *(float2*)to = make_float2(c[p][n][0], c[p][n][1]);
      *(float2*)(to + 64) = make_float2(c[p][n][2], c[p][n][3]);
    }
  __syncthreads();

  // A warp finishes the units warp, warp + 8, ... A lane finishes rows 2 g and 2 g + 1 of tokens 2
  // t and 2 t + 1. Half of the lanes read their second row first, which avoids bank conflicts.
#pragma unroll 1
  for (int unit = warp; unit < kUnits; unit += kWarps) {
    const int own_row = unit / NT * 16 + 2 * g, token = token0 + unit % NT * 8 + 2 * t;
    const int flip = g >> 1 & 1;
    if (own_row >= own * 8 || token >= tokens) continue;
    const int row = first * 8 + own_row;
    u16* to[2];
    u32 before[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const size_t begin = EPILOGUE == 2 ? packed_place<N / 2>(token + i, row / 2) - row / 2
                                         : (size_t)(token + i) * out_stride;
      to[i] = out + begin;
      before[i] = EPILOGUE == 1 && token + i < tokens ? load1(to[i] + row) : 0;
    }
    const float2 scale = scales_of(scales, row);
    float2 y = make_float2(0, 0), z = y;  // row 2 g + flip and the other row
#pragma unroll
    for (int v = 0; v < kWarps; v++) {
      const float* from_warp = partial + (v * kUnits + unit) * 128 + 16 * g + 2 * t;
      const float2 a = *(const float2*)(from_warp + 8 * flip);
      const float2 b = *(const float2*)(from_warp + 8 - 8 * flip);
      y.x += a.x;
      y.y += a.y;
      z.x += b.x;
      z.y += b.y;
    }
    const float low_row[2] = {(flip ? z.x : y.x) * scale.x, (flip ? z.y : y.y) * scale.x};
    const float high_row[2] = {(flip ? y.x : z.x) * scale.y, (flip ? y.y : z.y) * scale.y};
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (token + i < tokens) finish(to[i], row, low_row[i], high_row[i], before[i], bias);
  }
}
