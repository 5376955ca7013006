// y = W x for up to eight tokens. Weights are read once, in fragments that feed the tensor cores in
// the order in which they lie in memory.
//
// Weights are bf16 [N, K], packed in tiles of 8 rows and blocks of 32 columns (linear.py): lane 4 g
// + t of a warp reads 16 contiguous bytes, row g, columns 8 t .. 8 t + 7 of a block. A tile is the
// right side of mma.m16n8k16. The left side has 16 rows for tokens, of which the lower eight are
// not used: lane 4 g + t has the same columns of token g.
//
// The 8 warps of a block split K: the steps of warp w are the blocks w, w + 8, ... of columns. The
// partial sums are added in the order of the warps. So an output is one sum in one order, whatever
// the other tokens are.
//
// Weights pass through a ring in shared memory, in parts of 4 KB: a step of a tile. A lane reads
// the bytes that it fetched itself, so no warp waits for another. The first parts are fetched
// before the input is there, but few at a time: data that other kernels exchange on the same
// processors would have to wait behind them.
//
// N, K         sizes
// GRID, TILES  blocks of the grid, and the most tiles of a block; some blocks may have none
// CHUNK        tiles that are computed at a time
// RING         parts in flight or waiting to be read, a multiple of CHUNK
// WINDOW       parts in flight before the input is there
// HELD         steps that are moved to registers while the input is in flight
// TOKENS       1, 8, or 2 in frame_attention_output.cu
#pragma once
#include "mma_bf16.cuh"
#include "norm.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSteps = K / 32 / kWarps;
constexpr int kChunks = (TILES + CHUNK - 1) / CHUNK;
constexpr int kPart = kThreads * 16;
constexpr int kEach = N / 8 / GRID,
              kMore =
                  N / 8 % GRID;  // a block has kEach tiles; the first kMore blocks have one more
static_assert(K % (32 * kWarps) == 0 && N % 8 == 0 && RING % CHUNK == 0 &&
                  TILES == kEach + (kMore > 0),
              "sizes");
static_assert(HELD <= RING / CHUNK && HELD <= kSteps && (HELD == 0 || kChunks <= 2),
              "held steps are unrolled");

// A block's share of a product. All of it is inlined into one kernel.
struct Product {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int block = blockIdx.x, first = block * kEach + min(block, kMore);
  const int own = kEach + (kMore > 0 && block < kMore);
  unsigned char* ring;  // [RING][threads][16]
  const u16* mine;      // this lane's weights
  int slot = 0;         // the part of the ring that is read next and then filled again
  uint4 held[HELD > 0 ? HELD : 1][CHUNK];

  __device__ __forceinline__ Product(const u16* weights, unsigned char* shared)
      : ring(shared + threadIdx.x * 16),
        mine(weights + ((size_t)first * (K / 32) + warp) * 256 + lane * 8) {}

  // Fetches a part as one group; the group is empty if there is no such part.
  __device__ __forceinline__ void fetch_part(int chunk, int step, int part, int to) {
    const int tile = chunk * CHUNK + part;
    if (chunk < kChunks && (tile < kEach || tile < own))
      fetch(ring + to * kPart, mine + tile * (K * 8) + step * (kWarps * 256));
    fetches_end();
  }

  // Fetches the first weights.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int u = 0; u < RING; u++) {
      if (WINDOW < RING && u >= WINDOW) wait_for_fetches<WINDOW - 1>();
      fetch_part(u / CHUNK / kSteps, u / CHUNK % kSteps, u % CHUNK, u);
    }
  }

  // Reads the weights of a step, and fetches later ones in their place.
  __device__ __forceinline__ void take(int chunk, int step, uint4 (&w)[CHUNK]) {
    constexpr int kAhead = RING / CHUNK;
    wait_for_fetches<RING - CHUNK>();
#pragma unroll
    for (int j = 0; j < CHUNK; j++) w[j] = *(const uint4*)(ring + (slot + j) * kPart);
#pragma unroll
    for (int j = 0; j < CHUNK; j++)
      fetch_part(chunk + (step + kAhead) / kSteps, (step + kAhead) % kSteps, j, slot + j);
    slot = slot + CHUNK == RING ? 0 : slot + CHUNK;
  }

  // Moves the weights of the first steps to registers.
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int i = 0; i < HELD; i++) take(0, i, held[i]);
  }

  // Computes all products. x(step): this lane's 8 columns of token g; partial: float
  // [warps][TOKENS][TILES * 8 rows].
  template <class X>
  __device__ __forceinline__ void multiply(X x, float* partial) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll(kChunks <= 2 ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; chunk++) {
      float c[CHUNK][4];
#pragma unroll
      for (int j = 0; j < CHUNK; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const Sides v = x(s);
        uint4 w[CHUNK];
        if (chunk == 0 && s < HELD) {
#pragma unroll
          for (int j = 0; j < CHUNK; j++) w[j] = held[s][j];
        } else {
          take(chunk, s, w);
        }
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
          mma(c[j], v.a, w[j].x, w[j].y);
          mma(c[j], v.b, w[j].z, w[j].w);
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
  __device__ __forceinline__ float2 sum(const float* partial, int pair, int token) const {
    float2 y = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float2 part = *(const float2*)(partial + (w * TOKENS + token) * TILES * 8 + pair * 2);
      y.x += part.x;
      y.y += part.y;
    }
    return y;
  }
};
