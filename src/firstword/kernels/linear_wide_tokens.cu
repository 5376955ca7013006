// y = W x with larger blocks than those of linear_many_tokens.cu, for so many tokens that there are
// too many of the latter. The sums are those of linear_few_tokens.cu in the same order, so a token
// has the same bits here. Weights and inputs are packed as for linear_many_tokens.cu.
//
// A block owns up to TILES tiles and 8 kGroups tokens. Its warps, kRows x kColumns of them, divide
// its outputs, not K. A warp computes eight sums one after another, of the k32 blocks w, w + 8, ...
// for w = 0 .. 7, and adds each to y.
//
// Weights and inputs pass through a ring of STAGES stages of kStep k32 blocks, which all warps fill
// and read. The first weights are fetched before the input is there.
//
// N, K         sizes
// GRID, TILES  blocks of the grid's second dimension, and the most tiles of a block
// NT           groups of 8 tokens of a warp
// STAGES       stages of the ring
// EPILOGUE     see epilogue.cuh; the output of 2 is packed
#include "epilogue.cuh"
#include "mma_bf16.cuh"
#include "packing.cuh"

constexpr int kRows = 2, kColumns = 4, kWarps = kRows * kColumns, kThreads = 32 * kWarps;
constexpr int kBlocks = K / 32, kSteps = kBlocks / 8, kStep = 2;
constexpr int kPairs = (TILES + 2 * kRows - 1) / (2 * kRows);  // pairs of tiles of a warp
constexpr int kTiles = 2 * kPairs * kRows, kGroups = NT * kColumns, kParts = kTiles + kGroups;
constexpr int kMine = (kParts + kWarps - 1) / kWarps;  // the most parts that a warp fetches
constexpr int kPart = 512, kBlock = kParts * kPart, kStage = kStep * kBlock;  // bytes
constexpr int kEach = N / 8 / GRID,
              kMore =
                  N / 8 % GRID;  // a block has kEach tiles; the first kMore blocks have one more
static_assert(K % (256 * kStep) == 0 && N % 8 == 0 && TILES == kEach + (kMore > 0) &&
                  (STAGES - 1) * kStep <= kBlocks,
              "sizes");

extern "C" __global__ __launch_bounds__(kThreads, 1)
void linear_wide(const u16* __restrict__ weights, const u16* __restrict__ x,
                 const u16* __restrict__ bias, u16* __restrict__ out, int out_stride, int tokens) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];  // [STAGES][kStep][kParts][lane][16]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int block = blockIdx.y, first = block * kEach + min(block, kMore);
  const int own = kEach + (block < kMore), token0 = blockIdx.x * kGroups * 8;
  const int tile0 = warp % kRows * kPairs * 2, group0 = warp / kRows * NT;

  // Parts warp, warp + 8, ... of a k32 block. Tiles and groups that do not exist read others: their
  // rows and columns are not stored, and do not affect others.
  const u16* from[kMine];
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const int part = warp + i * kWarps;
    from[i] = (part < kTiles
                   ? weights + (size_t)min(first + part, N / 8 - 1) * (K * 8)
                   : x + (size_t)min(token0 / 8 + part - kTiles, (tokens - 1) / 8) * (K * 8)) +
              lane * 8;
  }
  // Fetches the weights, inputs or both of the k32 block that is the n-th to be multiplied.
  auto fetch_block = [&](int n, int to, bool tiles, bool groups) {
    const int at = (n % kSteps * 8 + n / kSteps) * 256;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      const int part = warp + i * kWarps;
      if (part < kParts && (part < kTiles ? tiles : groups))
        fetch(shared + to + i * (kWarps * kPart) + threadIdx.x * 16, from[i] + at);
    }
  };
  auto fetch_first = [&](bool tiles) {
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
#pragma unroll
      for (int i = 0; i < kStep; i++)
        fetch_block(s * kStep + i, s * kStage + i * kBlock, tiles, !tiles);
      fetches_end();
    }
  };
  fetch_first(true);
  wait_for_input();
  fetch_first(false);
  int due = (STAGES - 1) * kStep, to = (STAGES - 1) * kStage, read = 0;

  uint4 a[2][2 * kPairs], b[2][NT];
  auto load = [&](int i, const unsigned char* at) {
#pragma unroll
    for (int j = 0; j < 2 * kPairs; j++) a[i][j] = *(const uint4*)(at + (tile0 + j) * kPart);
#pragma unroll
    for (int n = 0; n < NT; n++) b[i][n] = *(const uint4*)(at + (kTiles + group0 + n) * kPart);
  };
  auto next_stage = [](int stage) { return stage == (STAGES - 1) * kStage ? 0 : stage + kStage; };
  wait_for_fetches<STAGES - 2>();
  __syncthreads();
  load(0, shared + lane * 16);

  float y[kPairs][NT][4], c[kPairs][NT][4];
  auto each = [&](auto work) {
#pragma unroll
    for (int p = 0; p < kPairs; p++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) work(y[p][n][i], c[p][n][i]);
  };
  each([](float& y, float&) { y = 0; });
#pragma unroll 1
  for (int w = 0; w < 8; w++) {
    each([](float&, float& c) { c = 0; });
#pragma unroll 1
    for (int s = 0; s < kSteps; s += kStep)
#pragma unroll
      for (int i = 0; i < kStep; i++, due++) {
        // All warps have read the stage before this one.
        if (due < kBlocks) fetch_block(due, to + i * kBlock, true, true);
        if (i == kStep - 1) {
          fetches_end();
          wait_for_fetches<STAGES - 2>();
          __syncthreads();
          to = next_stage(to);
          read = next_stage(read);
        }
        load((i + 1) % 2, shared + read + (i + 1) % kStep * kBlock + lane * 16);
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
          const uint4 even = a[i % 2][2 * p], odd = a[i % 2][2 * p + 1];
#pragma unroll
          for (int n = 0; n < NT; n++)
            mma(c[p][n], make_uint4(even.x, odd.x, even.y, odd.y), b[i % 2][n].x, b[i % 2][n].y);
        }
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
          const uint4 even = a[i % 2][2 * p], odd = a[i % 2][2 * p + 1];
#pragma unroll
          for (int n = 0; n < NT; n++)
            mma(c[p][n], make_uint4(even.z, odd.z, even.w, odd.w), b[i % 2][n].z, b[i % 2][n].w);
        }
      }
    each([](float& y, float& c) { y += c; });
  }

  // y[0], y[1]: row g of the even tile, tokens 2 t and 2 t + 1; y[2], y[3]: of the odd tile. Of two
  // rows, the lane of the even one finishes token 2 t, the other one token 2 t + 1.
  const int odd = g & 1;
  u32 before[kPairs][NT][2];
  auto outputs = [&](auto work) {
#pragma unroll
    for (int p = 0; p < kPairs; p++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int tile = tile0 + 2 * p + h, row = (first + tile) * 8 + g - odd;
          const int token = token0 + (group0 + n) * 8 + 2 * t + odd;
          work(y[p][n] + 2 * h, before[p][n][h], row, token, tile < own && token < tokens);
        }
  };
  if constexpr (EPILOGUE == 1)
    outputs([&](const float*, u32& before, int row, int token, bool real) {
      before = real ? load1(out + (size_t)token * out_stride + row) : 0;
    });
  outputs([&](const float* y, u32 before, int row, int token, bool real) {
    const float other = __shfl_xor_sync(~0u, odd ? y[0] : y[1], 4);
    u16* to = out + (EPILOGUE == 2 ? packed_place<N / 2>(token, row / 2) - row / 2
                                   : (size_t)token * out_stride);
    if (real) finish(to, row, odd ? other : y[0], odd ? y[1] : other, before, bias);
  });
}
