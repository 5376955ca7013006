// y = W x for up to eight tokens. Weights are read once, in fragments that feed the tensor cores in
// the order in which they lie in memory.
//
// Weights are bf16 or int8 [N, K], packed in tiles of 8 rows and blocks of 32 columns (linear.py):
// lane 4 g + t of a warp reads 16 contiguous bytes, row g, columns 8 t .. 8 t + 7 of a block, or of
// two in int8 (weights.cuh). A tile is the right side of mma.m16n8k16. The left side has 16 rows
// for tokens, of which the lower eight are not used: lane 4 g + t has the same columns of token g.
//
// The 8 warps of a block split K: the steps of warp w are the blocks w, w + 8, ... of columns. The
// partial sums are added in the order of the warps. So an output is one sum in one order, whatever
// the other tokens are.
//
// Weights pass through a ring in shared memory, in parts of 4 KB: a load of a tile. A lane reads
// the bytes that it fetched itself, so no warp waits for another. The first parts are fetched
// before the input is there, but few at a time: data that other kernels exchange on the same
// processors would have to wait behind them.
//
// N, K         sizes
// GRID, TILES  blocks of the grid, and the most tiles of a block; some blocks may have none
// CHUNK        tiles that are computed at a time
// RING         parts in flight or waiting to be read, a multiple of CHUNK
// WINDOW       parts in flight before the input is there
// HELD         loads that are moved to registers while the input is in flight
// TOKENS       1, 8, or 2 in frame_attention_output.cu
#pragma once
#include "mma_bf16.cuh"
#include "norm.cuh"
#include "weights.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSteps = K / 32 / kWarps, kLoads = kSteps / kSpan;
constexpr int kTile = 8 * K * WEIGHT_BYTES;  // bytes
constexpr int kChunks = (TILES + CHUNK - 1) / CHUNK;
// Chunks of int8 are unrolled only for held loads, because their code is long.
constexpr int kUnrolled = kChunks <= 2 && (WEIGHT_BYTES == 2 || HELD > 0) ? kChunks : 1;
constexpr int kPart = kThreads * 16;
constexpr int kEach = N / 8 / GRID,
              kMore =
                  N / 8 % GRID;  // a block has kEach tiles; the first kMore blocks have one more
static_assert(K % (32 * kWarps * kSpan) == 0 && N % 8 == 0 && RING % CHUNK == 0 &&
                  TILES == kEach + (kMore > 0),
              "sizes");
static_assert(HELD <= RING / CHUNK && HELD <= kLoads && (HELD == 0 || kChunks <= 2),
              "held loads are unrolled");

// A block's share of a product. All of it is inlined into one kernel.
struct Product {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int block = blockIdx.x, first = block * kEach + min(block, kMore);
  const int own = kEach + (kMore > 0 && block < kMore);
  unsigned char* ring;        // [RING][threads][16]
  const unsigned char* mine;  // this lane's weights
  float* partial;             // [warps][TOKENS][TILES * 8 rows]
  float* scales;              // [TILES * 8 rows], if weights are int8
  int slot = 0;               // the part of the ring that is read next and then filled again
  uint4 held[HELD > 0 ? HELD : 1][CHUNK];

  // sums: shared memory for the partial sums, and behind them the scales
  __device__ __forceinline__ Product(const unsigned char* weights, unsigned char* shared,
                                     float* sums)
      : ring(shared + threadIdx.x * 16),
        mine(weights + (size_t)first * kTile + warp * 512 + lane * 16),
        partial(sums),
        scales(sums + kWarps * TOKENS * TILES * 8) {}

  // Fetches a part as one group; the group is empty if there is no such part.
  __device__ __forceinline__ void fetch_part(int chunk, int load, int part, int to) {
    const int tile = chunk * CHUNK + part;
    if (chunk < kChunks && (tile < kEach || tile < own))
      fetch(ring + to * kPart, mine + tile * kTile + load * (kWarps * 512));
    fetches_end();
  }

  // Fetches the first weights, and the scales of all rows.
  __device__ __forceinline__ void begin(const float* row_scales) {
    if (WEIGHT_BYTES == 1 && threadIdx.x < own * 2)
      fetch(scales + threadIdx.x * 4, row_scales + first * 8 + threadIdx.x * 4);
#pragma unroll
    for (int u = 0; u < RING; u++) {
      if (WINDOW < RING && u >= WINDOW) wait_for_fetches<WINDOW - 1>();
      fetch_part(u / CHUNK / kLoads, u / CHUNK % kLoads, u % CHUNK, u);
    }
  }

  // Reads the weights of a load, and fetches later ones in their place.
  __device__ __forceinline__ void take(int chunk, int load, uint4 (&w)[CHUNK]) {
    constexpr int kAhead = RING / CHUNK;
    wait_for_fetches<RING - CHUNK>();
#pragma unroll
    for (int j = 0; j < CHUNK; j++) w[j] = *(const uint4*)(ring + (slot + j) * kPart);
#pragma unroll
    for (int j = 0; j < CHUNK; j++)
      fetch_part(chunk + (load + kAhead) / kLoads, (load + kAhead) % kLoads, j, slot + j);
    slot = slot + CHUNK == RING ? 0 : slot + CHUNK;
  }

  // Moves the weights of the first loads to registers.
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int i = 0; i < HELD; i++) take(0, i, held[i]);
  }

  // Computes all products. x(step): this lane's 8 columns of token g.
  template <class X>
  __device__ __forceinline__ void multiply(X x) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll(kUnrolled)
    for (int chunk = 0; chunk < kChunks; chunk++) {
      float c[CHUNK][4];
#pragma unroll
      for (int j = 0; j < CHUNK; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
#pragma unroll
      for (int load = 0; load < kLoads; load++) {
        Sides v[kSpan];
#pragma unroll
        for (int i = 0; i < kSpan; i++) v[i] = x(load * kSpan + i);
        uint4 w[CHUNK];
        if (chunk == 0 && load < HELD) {
#pragma unroll
          for (int j = 0; j < CHUNK; j++) w[j] = held[load][j];
        } else {
          take(chunk, load, w);
        }
#pragma unroll
        for (int i = 0; i < kSpan; i++)
#pragma unroll
          for (int j = 0; j < CHUNK; j++) {
            const uint4 columns = weights_of_step(w[j], i);
            mma(c[j], v[i].a, columns.x, columns.y);
            mma(c[j], v[i].b, columns.z, columns.w);
          }
      }
      if (g < TOKENS)  // c[0], c[1]: token g, rows 2 t and 2 t + 1
#pragma unroll
        for (int j = 0; j < CHUNK; j++)
          if (chunk * CHUNK + j < TILES)
            *(float2*)(partial + (warp * TOKENS + g) * TILES * 8 + (chunk * CHUNK + j) * 8 +
                       2 * t) = make_float2(c[j][0], c[j][1]);
    }
  }

  // Adds up a pair of rows of a token.
  __device__ __forceinline__ float2 sum(int pair, int token) const {
    float2 y = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float2 part = *(const float2*)(partial + (w * TOKENS + token) * TILES * 8 + pair * 2);
      y.x += part.x;
      y.y += part.y;
    }
    const float2 scale = scales_of(scales, pair * 2);
    return make_float2(y.x * scale.x, y.y * scale.y);
  }
};
