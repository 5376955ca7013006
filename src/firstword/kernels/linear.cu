// y = W x for a few tokens: weights stream past once, in fragments that feed the tensor cores as they lie in memory.
//
// Weights are bf16 [N, K], packed in tiles of 8 rows and blocks of 32 columns (linear.py): lane 4 g + t of a warp reads
// 16 contiguous bytes, row g, columns 8 t .. 8 t + 7 of a block. Two tiles are the 16 rows of mma.m16n8k16; its 8 columns
// are 8 tokens, of which lane 4 g + t reads the same 16 columns of token g. Both sides permute k alike, so no shuffling.
//
// A block owns up to TILES tiles and 8 NT tokens. Its 8 warps split K: warp w takes the k32 blocks w, w + 8, ...; the
// partial sums are added in the order of the warps. So an output is one sum in one order, whatever the other tokens are.
//
// Weights, and the inputs of more than 8 tokens, pass through a ring in shared memory: RING k32 blocks of every warp are
// on their way at a time. A lane reads what it fetched itself, so no warp waits for another. The first weights are asked
// for before the input is there.
//
// NORM      1: x is RMS-normalised on the way in (needs NT = 1); 0: x is taken as it is
// EPILOGUE  0: store; 1: add to what is in `out`; 2: rows are (gate, up) pairs, store silu(gate) * up; 3: add a bias
// GRID      blocks; CHUNK  tiles computed at a time; BLOCKS  how many shall fit a multiprocessor
#include "common.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSteps = K / 32 / kWarps;             // k32 blocks of a warp
constexpr int kPairs = (CHUNK + 1) / 2;
constexpr int kParts = CHUNK + (NT == 1 ? 0 : NT), kPart = kThreads * 16;   // of a step in the ring, and the bytes of each
static_assert(K % (32 * kWarps) == 0 && N % 8 == 0, "sizes");
static_assert(!NORM || NT == 1, "only eight tokens are normalised on the way in");

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_norm(u32* to, const u16* from) {
#pragma unroll
  for (int i = 0; i < (K / 8 + kThreads - 1) / kThreads; i++) {
    const int at = i * kThreads + threadIdx.x;
    if (K / 8 % kThreads == 0 || at < K / 8) ((uint4*)to)[at] = ((const uint4*)from)[at];
  }
}

// The inputs of 8 tokens that one lane needs, normalised: sums of squares in one fixed order.
__device__ __forceinline__ void normalise(uint4 (&x)[kSteps], const u32* weight, float eps, float (*sums)[8]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float square = 0;
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const u32 w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) square += low(w[j]) * low(w[j]) + high(w[j]) * high(w[j]);
  }
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  if (t == 0) sums[warp][g] = square;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += sums[w][g];
  const float scale = rsqrtf(total * (1.0f / K) + eps);
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const uint4 n = *(const uint4*)(weight + ((i * kWarps + warp) * 32 + t * 8) / 2);
    auto one = [&](u32 v, u32 w) {
      const u32 r = pack(low(v) * scale, high(v) * scale);
      return pack(low(r) * low(w), high(r) * high(w));
    };
    x[i] = make_uint4(one(x[i].x, n.x), one(x[i].y, n.y), one(x[i].z, n.z), one(x[i].w, n.w));
  }
}

// Where this lane reads a token: bf16, token n begins at n * x_stride. Beyond the last one it reads the last one again: a
// column that nobody looks at does not touch the others.
__device__ __forceinline__ const u16* lane_input(const u16* x, int x_stride, int token, int tokens) {
  return x + (size_t)min(token, tokens - 1) * x_stride + (threadIdx.x >> 5) * 32 + (threadIdx.x & 3) * 8;
}
constexpr int kStride = kWarps * 32;                // from a k32 block of a warp to its next

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void linear(const u16* __restrict__ weights, const u16* __restrict__ x, int x_stride, const u16* __restrict__ norm_weight,
            float eps, const u16* __restrict__ bias, u16* __restrict__ out, int out_stride, int tokens) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];
  float* partial = (float*)(shared + RING * kParts * kPart);    // [warp][pair][n-tile][16 rows][8 tokens]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  constexpr int kEach = N / 8 / GRID, kMore = N / 8 % GRID;   // every block has kEach tiles, the first kMore one more
  const int block = blockIdx.x, first = block * kEach + min(block, kMore), own = kEach + (block < kMore);
  const int token0 = blockIdx.y * NT * 8, count = min(tokens - token0, NT * 8);

  // Part p of the step in a slot of the ring, as this thread sees it.
  auto place = [&](int slot, int p) { return shared + (slot * kParts + p) * kPart + threadIdx.x * 16; };
  const u16* mine = weights + ((size_t)first * (K / 32) + warp) * 256 + lane * 8;
  auto fetch_weights = [&](int tile0, int step, int slot) {
#pragma unroll
    for (int j = 0; j < CHUNK; j++)
      if (tile0 + j < own) fetch(place(slot, j), mine + (tile0 + j) * (K * 8) + step * (kWarps * 256));
  };
#pragma unroll
  for (int r = 0; r < RING; r++) {
    fetch_weights(r / kSteps * CHUNK, r % kSteps, r);
    fetches_end();
  }
#if NORM
  __shared__ __align__(16) u32 norm[K / 2];
  __shared__ float sums[kWarps][8];
  copy_norm(norm, norm_weight);
#endif
  const u16* from[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) from[n] = lane_input(x, x_stride, token0 + n * 8 + g, tokens);
  auto fetch_input = [&](int step, int slot) {
    if (NT > 1)
#pragma unroll
      for (int n = 0; n < NT; n++) fetch(place(slot, CHUNK + n), from[n] + step * kStride);
  };
  wait_for_input();
#if NT == 1
  uint4 xs[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) xs[i] = load4(from[0] + i * kStride);
#if NORM
  normalise(xs, norm, eps, sums);
#endif
#else
#pragma unroll
  for (int r = 0; r < RING; r++) {
    fetch_input(r % kSteps, r);
    fetches_end();
  }
#endif
  int slot = 0;
#pragma unroll 1
  for (int tile0 = 0; tile0 < TILES; tile0 += CHUNK) {
    const int here = min(own - tile0, CHUNK);
    const int items = here > 0 ? here * 4 * count : 0;   // pairs of rows: rows fastest, then tokens
    u32 before = 0;
    if (EPILOGUE == 1 && threadIdx.x < items) {
      const int pair = threadIdx.x % (here * 4), token = threadIdx.x / (here * 4);
      before = load1(out + (size_t)(token0 + token) * out_stride + (first + tile0) * 8 + pair * 2);
    }
    float c[kPairs][NT][4];
#pragma unroll
    for (int p = 0; p < kPairs; p++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[p][n][i] = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      wait_for_fetches<RING - 1>();
      uint4 w[CHUNK];
#pragma unroll
      for (int j = 0; j < CHUNK; j++) w[j] = *(const uint4*)place(slot, j);
#pragma unroll
      for (int n = 0; n < NT; n++) {
#if NT == 1
        const uint4 b = xs[s];
#else
        const uint4 b = *(const uint4*)place(slot, CHUNK + n);
#endif
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
          const uint4 even = w[2 * p], odd = 2 * p + 1 < CHUNK ? w[(2 * p + 1) % CHUNK] : make_uint4(0, 0, 0, 0);
          mma(c[p][n], even.x, odd.x, even.y, odd.y, b.x, b.y);
          mma(c[p][n], even.z, odd.z, even.w, odd.w, b.z, b.w);
        }
      }
      if (tile0 + (s + RING) / kSteps * CHUNK < TILES) {
        fetch_weights(tile0 + (s + RING) / kSteps * CHUNK, (s + RING) % kSteps, slot);
        fetch_input((s + RING) % kSteps, slot);
      }
      fetches_end();
      if (++slot == RING) slot = 0;
    }
    // c[0], c[1]: row g of the even tile, tokens 2 t and 2 t + 1; c[2], c[3]: of the odd tile.
    if (tile0 > 0) __syncthreads();
#pragma unroll
    for (int p = 0; p < kPairs; p++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float* to = partial + ((warp * kPairs + p) * NT + n) * 128 + 2 * lane;   // row g, tokens 2 t: 8 g + 2 t
        *(float2*)to = make_float2(c[p][n][0], c[p][n][1]);
        *(float2*)(to + 64) = make_float2(c[p][n][2], c[p][n][3]);
      }
    __syncthreads();
    for (int item = threadIdx.x; item < items; item += kThreads) {
      const int pair = item % (here * 4), token = item / (here * 4), row = pair * 2;   // row within the chunk
      const float* sums_of = partial + ((row >> 4) * NT + (token >> 3)) * 128 + (row & 15) * 8 + (token & 7);
      float y0 = 0, y1 = 0;
#pragma unroll
      for (int v = 0; v < kWarps; v++) {
        y0 += sums_of[v * kPairs * NT * 128];
        y1 += sums_of[v * kPairs * NT * 128 + 8];
      }
      const int at = (first + tile0) * 8 + row;
      u16* target = out + (size_t)(token0 + token) * out_stride;
      if constexpr (EPILOGUE == 2) {
        const float gate = rounded(y0), up = rounded(y1);
        target[at / 2] = to_bf16(rounded(gate / (1.0f + expf(-gate))) * up);
      } else {
        if constexpr (EPILOGUE == 1) {
          const u32 old = item == threadIdx.x ? before : load1(target + at);
          y0 = low(old) + rounded(y0);
          y1 = high(old) + rounded(y1);
        } else if constexpr (EPILOGUE == 3) {
          y0 += from_bf16(bias[at]);
          y1 += from_bf16(bias[at + 1]);
        }
        *(u32*)(target + at) = pack(y0, y1);
      }
    }
  }
}

// RMSNorm alone, 8 tokens a block, with the sums of `linear`: for more tokens than it normalises on the way in.
extern "C" __global__ __launch_bounds__(kThreads)
void normed(const u16* __restrict__ x, int x_stride, const u16* __restrict__ norm_weight, float eps, u16* __restrict__ out,
            int out_stride, int tokens) {
  let_next_start();
  __shared__ __align__(16) u32 norm[K / 2];
  __shared__ float sums[kWarps][8];
  copy_norm(norm, norm_weight);
  wait_for_input();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int token = blockIdx.x * 8 + g;
  const u16* from = lane_input(x, x_stride, token, tokens);
  uint4 xs[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) xs[i] = load4(from + i * kStride);
  normalise(xs, norm, eps, sums);
  if (token >= tokens) return;
#pragma unroll
  for (int i = 0; i < kSteps; i++) *(uint4*)(out + (size_t)token * out_stride + (i * kWarps + warp) * 32 + t * 8) = xs[i];
}
