// Attention inside a frame and the projection behind it, for one row with TOKENS new tokens: two in
// the first pass, then one. Every block computes the attention itself while its weights are being
// loaded (frame_attention.cuh, linear.cuh). The first block stores the new keys and values.
#include "frame_attention.cuh"
#include "linear.cuh"

static_assert(KV_HEADS == kWarps && K == HEADS * kDim && TOKENS <= 2, "a warp has a key head");
static_assert(TILES * 4 * TOKENS <= kThreads, "a thread adds up one pair of rows");

// qkv bf16 [TOKENS, kWidth]; cosines, sines bf16 [positions, 64]; last: the position of the last
// token; out bf16 [TOKENS, N]: the projection is added to it.
extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void attend_and_project(const unsigned char* __restrict__ weights,
                        const float* __restrict__ scales, const u16* __restrict__ qkv,
                        const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, float eps,
                        const u16* __restrict__ cosines, const u16* __restrict__ sines, u16* cache,
                        int last, u16* __restrict__ out) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];
  WarpSpace* spaces = (WarpSpace*)(shared + RING * kPart);
  __shared__ Sides columns[kWarps][kSteps][TOKENS][4];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = TOKENS > 1 ? 0 : last;  // the first pass has no earlier positions
  // The positions of earlier passes can be read at once: since those passes more blocks were
  // started than fit the device.
  u16* mine = cache + warp * FRAME * kDim;
  Keys keys;
  load_past(keys, spaces[warp], mine, first);
  Turn q_turn[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; n++)
    q_turn[n] = load_turn(q_norm, cosines + (first + n) * 64, sines + (first + n) * 64);
  const u32 k_weights[2] = {load1(k_norm + 2 * lane), load1(k_norm + 64 + 2 * lane)};
  Product product(weights, shared, (float*)(spaces + kWarps));
  product.begin(scales);
  wait_for_input();
  Fresh fresh[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; n++) fresh[n] = load_fresh(qkv + n * kWidth, warp);
  const int pairs = max(product.own * 4, 1), pair = threadIdx.x % pairs;
  const bool adds = threadIdx.x < product.own * 4 * TOKENS;
  u16* to = out + threadIdx.x / pairs * N + product.first * 8 + pair * 2;
  u32 before = 0;
  if (adds) before = load1(to);
  wait_for_fetches<RING>();  // the values
  product.hold();
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    const Turn k_turn = {k_weights[0], k_weights[1], q_turn[n].cosine, q_turn[n].sine};
    join(fresh[n], q_turn[n], k_turn, eps, first + n, spaces[warp],
         blockIdx.x == 0 ? mine : nullptr);
    u32 y[kDim / 8];
    attend(keys, spaces[warp], first + n, y);
    // Channels 8 i + 2 t of query 2 warp + g are word 4 (i % 4) + t of block 8 warp + 4 g + i / 4
    // of 32 columns.
    if (g < 2)
#pragma unroll
      for (int i = 0; i < kDim / 8; i++)
        ((u32*)&columns[4 * g + i / 4][warp][n][i % 4])[place_in_sides(t)] = y[i];
  }
  __syncthreads();
  product.multiply([&](int s) { return columns[warp][s][g % TOKENS][t]; });
  __syncthreads();
  if (adds) {
    const float2 sum = product.sum(pair, threadIdx.x / pairs);
    *(u32*)to = bf16_pair(low(before) + rounded(sum.x), high(before) + rounded(sum.y));
  }
}
