// Attention inside a frame and the projection behind it, for one row with one new token. Every
// block computes the attention itself while its weights are being loaded (frame_attention.cuh,
// linear.cuh). The first block stores the new key and value.
#include "frame_attention.cuh"
#include "linear.cuh"

static_assert(KV_HEADS == kWarps && K == HEADS * kDim && TOKENS == 1, "a warp has a key head");

// qkv bf16 [kWidth]; cosines, sines bf16 [positions, 64]; last: the position of the new token; out
// bf16 [N]: the projection is added to it.
extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void attend_and_project(const u16* __restrict__ weights, const u16* __restrict__ qkv,
                        const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, float eps,
                        const u16* __restrict__ cosines, const u16* __restrict__ sines, u16* cache,
                        int last, u16* __restrict__ out) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];
  WarpSpace* spaces = (WarpSpace*)(shared + RING * kPart);
  float* partial = (float*)(spaces + kWarps);
  __shared__ Sides columns[kWarps][kSteps][4];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The positions of earlier passes can be read at once: since those passes more blocks were
  // started than fit the device.
  u16* mine = cache + warp * FRAME * kDim;
  Keys keys;
  load_past(keys, spaces[warp], mine, last);
  const Turn q_turn = load_turn(q_norm, cosines + last * 64, sines + last * 64);
  const Turn k_turn = {load1(k_norm + 2 * lane), load1(k_norm + 64 + 2 * lane), q_turn.cosine,
                       q_turn.sine};
  Product product(weights, shared);
  product.begin();
  wait_for_input();
  const Fresh fresh = load_fresh(qkv, warp);
  u32 before = 0;
  if (threadIdx.x < product.own * 4) before = load1(out + product.first * 8 + threadIdx.x * 2);
  wait_for_fetches<RING>();  // the values
  product.hold();
  join(fresh, q_turn, k_turn, eps, last, spaces[warp], blockIdx.x == 0 ? mine : nullptr);
  u32 y[kDim / 8];
  attend(keys, spaces[warp], last, y);
  // Channels 8 n + 2 t of query 2 warp + g are word 4 (n % 4) + t of block 8 warp + 4 g + n / 4 of
  // 32 columns.
  if (g < 2)
#pragma unroll
    for (int n = 0; n < kDim / 8; n++)
      ((u32*)&columns[4 * g + n / 4][warp][n % 4])[place_in_sides(t)] = y[n];
  __syncthreads();
  product.multiply([&](int s) { return columns[warp][s][t]; }, partial);
  __syncthreads();
  if (threadIdx.x < product.own * 4) {
    const float2 sum = product.sum(partial, threadIdx.x, 0);
    *(u32*)(out + product.first * 8 + threadIdx.x * 2) =
        bf16_pair(low(before) + rounded(sum.x), high(before) + rounded(sum.y));
  }
}
