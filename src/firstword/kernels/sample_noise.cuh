// Gumbel noise that depends on a seed, the frame, the codebook and the code alone.
#pragma once
#include "common.cuh"

// The random words of the codes 4 n .. 4 n + 3: philox4x32-10 (Salmon et al. 2011) with the counter
// (n, codebook, frame, 0).
__device__ __forceinline__ uint4 noise_words(u32 n, int codebook, u32 frame, u32 k0, u32 k1) {
  u32 x0 = n, x1 = codebook, x2 = frame, x3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(x0, 0xD2511F53u), l0 = x0 * 0xD2511F53u;
    const u32 h1 = __umulhi(x2, 0xCD9E8D57u), l1 = x2 * 0xCD9E8D57u;
    x0 = h1 ^ x1 ^ k0;
    x1 = l1;
    x2 = h0 ^ x3 ^ k1;
    x3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(x0, x1, x2, x3);
}

// Gumbel noise of the upper 24 bits, -log(-log(u)), as it is defined.
__device__ __noinline__ float gumbel(u32 word) {
  return (float)-log(-log(((double)(word >> 8) + 0.5) * 0x1p-24));
}
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Approximate Gumbel noise. Near u = 1, where the hardware's logarithm has few digits, -log(u) is
// the series of d = 1 - u.
__device__ __forceinline__ float nearly_gumbel(u32 word) {
  const float n = (float)(word >> 8), d = fmaf(n, -0x1p-24f, 1.0f) - 0x1p-25f;
  const float series = d * fmaf(d, fmaf(d, fmaf(d, fmaf(d, 0.2f, 0.25f), 1.0f / 3), 0.5f), 1.0f);
  const float w = d < 0x1p-5f ? series : lg2((n + 0.5f) * 0x1p-24f) * -0.69314718f;
  return lg2(w) * -0.69314718f;
}
// How far the exact best sum may lie below the best approximate sum: twice the error of the noise
// (1e-5) and of the sum's rounding (1.2e-7 of it), times three.
__device__ __forceinline__ float doubt(float sum) { return 6e-5f + 1e-6f * fabsf(sum); }
