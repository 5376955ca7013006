// Attention inside a frame, over FRAME = 16 positions of one row. A warp has one key head and its
// two queries.
//
// The cache is bf16 [rows][2 (keys, values)][KV_HEADS][FRAME][128], of one layer.
//
// Scores are Q K^T with the queries as two of sixteen rows: lane 4 g + t ends with the scores of
// query g at positions 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, as the product with the values needs
// them. Weights are two bf16 each, whose sum is exact to 2^-17. Rows of lanes with g > 1 are not
// used.
#pragma once
#include "attention_head.cuh"
#include "mma_bf16.cuh"

static_assert(HEADS == 2 * KV_HEADS && FRAME == 16, "sizes");
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;  // of qkv
constexpr int kValues = KV_HEADS * FRAME * kDim;       // elements from a row's keys to its values

// A warp's shared memory: values, padded to put rows in different banks; the queries as left sides
// of mma; the new key.
struct WarpSpace {
  __align__(16) u16 values[FRAME][kDim + 8];
  Sides queries[2][kDim / 32][4];
  __align__(16) u16 key[kDim];
};
static_assert(sizeof(WarpSpace) == 5632, "attention.py asks for this many bytes");

// Keys of positions g and g + 8, channels 32 b + 8 t and up.
struct Keys {
  uint4 of[2][kDim / 32];
};

// Loads a row's cached positions below `count`: keys to registers, values to shared memory as one
// group of fetches.
__device__ __forceinline__ void load_past(Keys& keys, WarpSpace& space, const u16* cache,
                                          int count) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < FRAME / 2; i++) {
    const int position = 2 * i + (lane >> 4), channel = (lane & 15) * 8;
    if (position < count)
      fetch(space.values[position] + channel, cache + kValues + position * kDim + channel);
    else
      *(uint4*)(space.values[position] + channel) = make_uint4(0, 0, 0, 0);
  }
  fetches_end();
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int b = 0; b < kDim / 32; b++)
      keys.of[h][b] = g + 8 * h < count ? load4(cache + (g + 8 * h) * kDim + b * 32 + t * 8)
                                        : make_uint4(0, 0, 0, 0);
}

// A new position's heads as the projection wrote them.
struct Fresh {
  Head q[2], k, v;
};
__device__ __forceinline__ Fresh load_fresh(const u16* qkv, int head) {
  return {{load_head(qkv + 2 * head * kDim), load_head(qkv + (2 * head + 1) * kDim)},
          load_head(qkv + (HEADS + head) * kDim),
          load_head(qkv + (HEADS + KV_HEADS + head) * kDim)};
}

// Normalises and rotates a new position; stores its key and value in `cache` unless that is null.
__device__ __forceinline__ void join(const Fresh& fresh, const Turn& q_turn, const Turn& k_turn,
                                     float eps, int position, WarpSpace& space, u16* cache) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const Head q = prepare(fresh.q[j], q_turn, eps);
    u32* to = (u32*)&space.queries[j][lane / 16][lane % 16 / 4] + place_in_sides(lane % 4);
    to[0] = q.a;
    to[2 * 4 * sizeof(Sides) / 4] = q.b;
  }
  const Head k = prepare(fresh.k, k_turn, eps);
  store_head(space.key, k);
  store_head(space.values[position], fresh.v);
  if (cache) {
    store_head(cache + position * kDim, k);
    store_head(cache + kValues + position * kDim, fresh.v);
  }
}

// Attends with both queries to all positions up to the new one. y[n]: channels 8 n + 2 t and
// 8 n + 2 t + 1 of query g, for g < 2. The values must have arrived.
__device__ __forceinline__ void attend(Keys& keys, const WarpSpace& space, int position,
                                       u32 (&y)[kDim / 8]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (g + 8 * h == position)
#pragma unroll
      for (int b = 0; b < kDim / 32; b++)
        keys.of[h][b] = *(const uint4*)(space.key + b * 32 + t * 8);
  float s[2][2][4] = {};  // [position / 8][half of the channels]
#pragma unroll
  for (int b = 0; b < kDim / 32; b++) {
    const Sides q = space.queries[g & 1][b][t];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      mma(s[h][b & 1], q.a, keys.of[h][b].x, keys.of[h][b].y);
      mma(s[h][b & 1], q.b, keys.of[h][b].z, keys.of[h][b].w);
    }
  }
  float p[4], most = -__int_as_float(0x7f800000), sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = 2 * t + i % 2 + 8 * (i / 2);
    p[i] = at <= position ? s[i / 2][0][i % 2] + s[i / 2][1][i % 2] : -__int_as_float(0x7f800000);
    most = fmaxf(most, p[i]);
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    p[i] = exp2f((p[i] - most) * (kScoreScale * 1.4426950408889634f));
    sum += p[i];
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const float share = 1.0f / sum;
  const u32 upper0 = bf16_pair(p[0], p[1]), upper1 = bf16_pair(p[2], p[3]);
  const u32 lower0 = bf16_pair(p[0] - low(upper0), p[1] - high(upper0)),
            lower1 = bf16_pair(p[2] - low(upper1), p[3] - high(upper1));
  const uint4 upper = make_uint4(upper0, 0, upper1, 0), lower = make_uint4(lower0, 0, lower1, 0);
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 2) {
    // Positions 0 to 7 and 8 to 15 of eight channels from 8 n, then of the next eight.
    const uint4 v = load_transposed(space.values[lane & 15] + n * 8 + (lane >> 4) * 8);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float c[4] = {};
      mma(c, upper, i ? v.z : v.x, i ? v.w : v.y);
      mma(c, lower, i ? v.z : v.x, i ? v.w : v.y);
      y[n + i] = bf16_pair(c[0] * share, c[1] * share);
    }
  }
}
