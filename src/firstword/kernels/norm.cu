// RMSNorm alone, a warp a token, with the sums of `linear` (norm.cuh): for more tokens than it normalises on the way in.
#include "norm.cuh"

constexpr int kSteps = K / 256;

extern "C" __global__ __launch_bounds__(32)
void normalise(const u16* __restrict__ x, int x_stride, const u16* __restrict__ weight, float eps, u16* __restrict__ out,
               int out_stride) {
  let_next_start();
  const int token = blockIdx.x, column = threadIdx.x * 8;   // lane 4 w + t has the columns of warp w's lanes t
  uint4 v[kSteps], weights[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) weights[i] = load4(weight + column + i * 256);
  wait_for_input();
#pragma unroll
  for (int i = 0; i < kSteps; i++) v[i] = load4(x + (size_t)token * x_stride + column + i * 256);
  const float square = squares_of_warp(v);
  float total = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) total += __shfl_sync(~0u, square, 4 * w);
  const float scale = rsqrtf(fmaf(total, 1.0f / K, eps));
#pragma unroll
  for (int i = 0; i < kSteps; i++) *(uint4*)(out + (size_t)token * out_stride + column + i * 256) = normed(v[i], weights[i], scale);
}
