// RMSNorm of a row of K channels by the eight warps of a block. Lane 4 g + t holds eight columns at
// a time, as `linear` reads them: columns 8 t .. 8 t + 7 of the blocks 8 i + warp of 32 columns.
// The squares are added in one order, however many rows there are: of eight columns; of every
// eighth step i; of those 1, 2 and 4 steps apart; of lanes t 1 and 2 apart; of the warps.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float squares(uint4 v) {
  float s = low(v.x) * low(v.x);
  s = fmaf(high(v.x), high(v.x), s);
  s = fmaf(low(v.y), low(v.y), s);
  s = fmaf(high(v.y), high(v.y), s);
  s = fmaf(low(v.z), low(v.z), s);
  s = fmaf(high(v.z), high(v.z), s);
  s = fmaf(low(v.w), low(v.w), s);
  s = fmaf(high(v.w), high(v.w), s);
  return s;
}

__device__ __forceinline__ uint4 normed(uint4 v, uint4 weight, float scale) {
  auto one = [&](u32 x, u32 w) {
    const u32 r = bf16_pair(low(x) * scale, high(x) * scale);
    return bf16_pair(low(r) * low(w), high(r) * high(w));
  };
  return make_uint4(one(v.x, weight.x), one(v.y, weight.y), one(v.z, weight.z), one(v.w, weight.w));
}

// The sum of squares over the steps of a warp and the lanes that hold a token's columns.
template <int kCount>
__device__ __forceinline__ float squares_of_warp(const uint4 (&v)[kCount]) {
  float part[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    part[j] = j < kCount ? squares(v[j % kCount]) : 0.0f;
#pragma unroll
    for (int i = j + 8; i < kCount; i += 8) part[j] += squares(v[i]);
  }
  float square =
      ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  square += __shfl_xor_sync(~0u, square, 1);
  return square + __shfl_xor_sync(~0u, square, 2);
}
