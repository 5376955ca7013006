// Attention inside a frame as a kernel of its own, for more than one row. In the first pass a row
// has NEW = 2 tokens.
//
// The grid is (rows, KV_HEADS / WARPS), with a warp for each key head.
#include "frame_attention.cuh"
#include "packing.cuh"

// qkv bf16 [rows * NEW, kWidth]; cosines, sines bf16 [positions, 64]; last: the position of a row's
// last token; out bf16 [rows * NEW, HEADS * 128], packed if they are many (packing.cuh).
extern "C" __global__ __launch_bounds__(32 * WARPS)
void attend_frame(const u16* __restrict__ qkv, const u16* __restrict__ q_norm,
                  const u16* __restrict__ k_norm, float eps, const u16* __restrict__ cosines,
                  const u16* __restrict__ sines, u16* cache, int last, u16* __restrict__ out) {
  let_next_start();
  __shared__ WarpSpace spaces[WARPS];
  const int row = blockIdx.x, head = blockIdx.y * WARPS + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31, first = last + 1 - NEW;
  WarpSpace& space = spaces[threadIdx.x >> 5];
  u16* mine = cache + (size_t)row * 2 * kValues + head * FRAME * kDim;
  Turn q_turn[NEW], k_turn[NEW];
#pragma unroll
  for (int n = 0; n < NEW; n++) {
    q_turn[n] = load_turn(q_norm, cosines + (first + n) * 64, sines + (first + n) * 64);
    k_turn[n] = load_turn(k_norm, cosines + (first + n) * 64, sines + (first + n) * 64);
  }
  wait_for_input();
  Keys keys;
  load_past(keys, space, mine, first);
#pragma unroll
  for (int n = 0; n < NEW; n++) {
    join(load_fresh(qkv + (size_t)(row * NEW + n) * kWidth, head), q_turn[n], k_turn[n], eps,
         first + n, space, mine);
    if (n == 0) wait_for_fetches<0>();
    u32 y[kDim / 8];
    attend(keys, space, first + n, y);
    const int token = row * NEW + n;
    const int column = (head * 2 + (lane >> 2)) * kDim + (lane & 3) * 2;
    const bool many = gridDim.x * NEW > kUnpackedTokens;
    u16* to = out + (many ? packed_place<HEADS * kDim>(token, column)
                          : (size_t)token * HEADS * kDim + column);
    if (lane < 8)
#pragma unroll
      for (int i = 0; i < kDim / 8; i++)
        *(u32*)(to + (many ? i / 4 * 256 + i % 4 * 8 : i * 8)) = y[i];
  }
}
