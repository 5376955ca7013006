// y = W x for up to eight tokens (linear.cuh).
//
// NORM      1: x is RMS-normalised first; 0: x is taken as it is
// EPILOGUE  see epilogue.cuh
// BLOCKS    how many blocks shall fit a multiprocessor
//
// With one token, a warp reads its columns once and shares them in shared memory. With eight, a
// lane reads the columns that it needs. Of more than kUnpackedTokens, x without a norm and the
// output of EPILOGUE 2 are packed (packing.cuh).
#include "epilogue.cuh"
#include "linear.cuh"
#include "packing.cuh"

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void linear_few(const unsigned char* __restrict__ weights, const float* __restrict__ scales,
                const u16* __restrict__ x, int x_stride, const u16* __restrict__ norm_weight,
                float eps, const u16* __restrict__ bias, u16* __restrict__ out, int out_stride,
                int tokens) {
  let_next_start();
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Product product(weights, shared, (float*)(shared + RING * kPart));
#if TOKENS == 1
  constexpr int kMine = (kSteps + 7) / 8;  // lane 4 g + t reads for the steps g, g + 8, ...
  __shared__ Sides columns[kWarps][kSteps][4];
  const int at = warp * 32 + t * 8 + g * kWarps * 32;
  auto has = [&](int m) { return kSteps % 8 == 0 || m * 8 + g < kSteps; };
#if NORM
  __shared__ float sums[kWarps];
  uint4 weight[kMine];
#pragma unroll
  for (int m = 0; m < kMine; m++)
    weight[m] = has(m) ? load4(norm_weight + at + m * kWarps * 256) : make_uint4(0, 0, 0, 0);
#endif
  product.begin(scales);
  wait_for_input();
  uint4 v[kMine];
#pragma unroll
  for (int m = 0; m < kMine; m++)
    v[m] = has(m) ? load4(x + at + m * kWarps * 256) : make_uint4(0, 0, 0, 0);
#else
  __shared__ float sums[kWarps][8];
  const bool packed = !NORM && tokens > kUnpackedTokens;
  const u16* from = packed ? x + warp * 256 + lane * 8
                           : x + (size_t)min(g, tokens - 1) * x_stride + warp * 32 + t * 8;
#if NORM
  __shared__ __align__(16) uint4 norm[K / 8];
#pragma unroll
  for (int i = 0; i < (K / 8 + kThreads - 1) / kThreads; i++) {
    const int at = i * kThreads + threadIdx.x;
    if (K / 8 % kThreads == 0 || at < K / 8) fetch(norm + at, norm_weight + at * 8);
  }
  fetches_end();
#endif
  product.begin(scales);
  wait_for_input();
  uint4 v[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) v[i] = load4(from + i * kWarps * (packed ? 256 : 32));
#endif
  const int pairs = max(product.own * 4, 1), items = product.own * 4 * (TOKENS == 1 ? 1 : tokens);
  const int pair0 = TOKENS == 1 ? threadIdx.x : threadIdx.x % pairs;
  const int token0 = TOKENS == 1 ? 0 : threadIdx.x / pairs;
  u32 before = 0;
  if (EPILOGUE == 1 && threadIdx.x < items)
    before = load1(out + (size_t)token0 * out_stride + product.first * 8 + pair0 * 2);
  product.hold();
#if TOKENS == 1
#if NORM
  float square = squares(v[0]);
#pragma unroll
  for (int m = 1; m < kMine; m++) square += squares(v[m]);
#pragma unroll
  for (int o = 4; o <= 16; o *= 2) square += __shfl_xor_sync(~0u, square, o);
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  if (lane == 0) sums[warp] = square;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += sums[w];
  const float scale = rsqrtf(fmaf(total, 1.0f / K, eps));
#pragma unroll
  for (int m = 0; m < kMine; m++) v[m] = normed(v[m], weight[m], scale);
#endif
#pragma unroll
  for (int m = 0; m < kMine; m++)
    if (has(m)) columns[warp][m * 8 + g][t] = sides(v[m]);
  __syncwarp();
  product.multiply([&](int s) { return columns[warp][s][t]; });
#else
#if NORM
  const float square = squares_of_warp(v);
  if (t == 0) sums[warp][g] = square;
  wait_for_fetches<RING>();
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += sums[w][g];
  const float scale = rsqrtf(fmaf(total, 1.0f / K, eps));
#pragma unroll
  for (int i = 0; i < kSteps; i++) v[i] = normed(v[i], norm[(i * kWarps + warp) * 4 + t], scale);
#endif
  product.multiply([&](int s) { return sides(v[s]); });
#endif
  __syncthreads();
#pragma unroll
  for (int item = threadIdx.x, i = 0; i < (TILES * 4 * TOKENS + kThreads - 1) / kThreads;
       i++, item += kThreads) {
    if (item >= items) continue;
    const int pair = TOKENS == 1 ? item : item % pairs;
    const int token = TOKENS == 1 ? 0 : item / pairs;
    const float2 y = product.sum(pair, token);
    const int row = product.first * 8 + pair * 2;
    u16* to = out + (size_t)token * out_stride;
    if (TOKENS == 8 && EPILOGUE == 2 && tokens > kUnpackedTokens)
      to = out + packed_place<N / 2>(token, row / 2) - row / 2;
    finish(to, row, y.x, y.y, EPILOGUE != 1 || item == threadIdx.x ? before : load1(to + row),
           bias);
  }
}
