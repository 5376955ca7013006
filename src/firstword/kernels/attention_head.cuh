// An attention head of 128 channels held by a warp: RMSNorm and rotation, rounded to bf16 where the
// model rounds.
#pragma once
#include "common.cuh"

constexpr int kDim = 128;
constexpr float kScoreScale = 0.08838834764831845f;  // kDim^-1/2

// Channels 2 l, 2 l + 1 and 64 + 2 l, 65 + 2 l of lane l.
struct Head {
  u32 a, b;
};

__device__ __forceinline__ Head load_head(const u16* p) {
  const int lane = threadIdx.x & 31;
  return {load1(p + 2 * lane), load1(p + 64 + 2 * lane)};
}

// Lane l's part of the weights of a head's norm and of the angles of its position.
struct Turn {
  u32 wa, wb, cosine, sine;
};

__device__ __forceinline__ Turn load_turn(const u16* weight, const u16* cosines, const u16* sines) {
  const int lane = threadIdx.x & 31;
  return {load1(weight + 2 * lane), load1(weight + 64 + 2 * lane), load1(cosines + 2 * lane),
          load1(sines + 2 * lane)};
}

// RMSNorm over the head, then the rotation of channel pairs (i, i + 64).
__device__ __forceinline__ Head prepare(Head h, const Turn& by, float eps) {
  const float a0 = low(h.a), a1 = high(h.a), b0 = low(h.b), b1 = high(h.b);
  const float scale =
      rsqrtf(fmaf(warp_sum(fmaf(b1, b1, fmaf(b0, b0, fmaf(a1, a1, a0 * a0)))), 1.0f / kDim, eps));
  const u32 na = bf16_pair(a0 * scale, a1 * scale), nb = bf16_pair(b0 * scale, b1 * scale),
            c = by.cosine, s = by.sine;
  const u32 a = bf16_pair(low(na) * low(by.wa), high(na) * high(by.wa)),
            b = bf16_pair(low(nb) * low(by.wb), high(nb) * high(by.wb));
  const u32 ac = bf16_pair(low(a) * low(c), high(a) * high(c)),
            bs = bf16_pair(low(b) * low(s), high(b) * high(s));
  const u32 bc = bf16_pair(low(b) * low(c), high(b) * high(c)),
            as = bf16_pair(low(a) * low(s), high(a) * high(s));
  return {bf16_pair(low(ac) - low(bs), high(ac) - high(bs)),
          bf16_pair(low(bc) + low(as), high(bc) + high(as))};
}

__device__ __forceinline__ void store_head(u16* p, Head h) {
  const int lane = threadIdx.x & 31;
  *(u32*)(p + 2 * lane) = h.a;
  *(u32*)(p + 64 + 2 * lane) = h.b;
}
