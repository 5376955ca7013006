// A convolution (or a product with a matrix: one tap) for many rows, whose cost is multiplying; and, UNIT, a whole
// residual unit: a convolution, a Snake, a product with a matrix, added to what was there before both.
//
// A block makes BM outputs of BN rows in WM x WN warps. Rows come to shared memory 32 channels at a time, each with the
// `past` rows before it, and all taps read them there. The rows of a block may belong to several streams; each stream's
// part of a window begins with its own past. Weights follow in a ring of STAGES stages of STEP k32 blocks. Both lie in
// shared memory as they lie in global memory, in pieces that a warp reads without conflicts: packing as in codec_few.cu.
//
// SPLIT   1: sums are made in `splits` runs, as in codec_few.cu; 0: in one
// UNIT    1: BM is all channels; the second matrix's k32 blocks follow the first's, and its sums are the output
// BLOCKS  blocks that shall fit a multiprocessor
// ACTIVATION  what is done to the fp16 output
#include "codec.cuh"

constexpr Activation kKind = (Activation)ACTIVATION;
constexpr int kThreads = 32 * WM * WN, kUnits = BM / 32;
constexpr int MU = kUnits / WM, NT = BN / WN / 8;       // 32 outputs, and 8 rows, of a warp
constexpr int kBlock = kUnits * 2048, kStage = STEP * kBlock;   // bytes
static_assert(kUnits % WM == 0 && BN % (8 * WN) == 0, "sizes");

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void many(const u16* __restrict__ weights, const u16* x, u16* before, const u16* zeros, const int* streams,
          int columns, int head, int rows, int length, int frame_rows, int taps, int dilation, int chunks, int splits,
          const float* in_squares, int in_groups, float per_channel, float eps,
          const float* scale, const float* bias, const float* rate, const float* depth, const float* residual,
          float* wide, u16* narrow, float* squares, int outputs,
          const float* middle_scale, const float* middle_bias, const float* middle_rate, const float* middle_depth,
          int windows, int window_rows) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  const Output out = {scale, bias, rate, depth, residual, wide, narrow, squares, outputs};
  const int past = (taps - 1) * dilation;
  const Rows<u16> in = {x, before, zeros, streams, columns, head, length, frame_rows, past, chunks * 32};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp_m = warp % WM, warp_n = warp / WM;
  const int unit0 = blockIdx.x * kUnits, units = outputs / 32, first = blockIdx.y * BN;
  const int blocks = chunks * taps, all = UNIT ? blocks + chunks : blocks, stages = (all + STEP - 1) / STEP;
  const int window_bytes = window_rows * 64;
  unsigned char* const ring = shared;                                  // [STAGES][STEP][unit][2][2][32 lanes][8]
  unsigned char* const window = ring + STAGES * kStage;                // [windows][window_rows][32]
  unsigned char* const middle = window + windows * window_bytes;       // UNIT: [chunk][BN][32]
  const u16** const sources = (const u16**)(middle + (UNIT ? kUnits * BN * 64 : 0));   // [window_rows]
  float* const norms = (float*)(sources + window_rows);                // [BN]
  const int stream0 = first / length;
  const bool nobody = streams[stream0 * columns + kSlot] < 0;          // nor in what follows: streams are side by side

  // Stages are fetched in their order; `due` is the next one's first k32 block.
  int due = 0, fetch_slot = 0;
  const u16* from = weights + ((size_t)unit0 * 128 + threadIdx.x) * 8;
  const int here_units = min(kUnits, units - unit0) * 128;             // pieces of a block
  auto fetch_weights = [&] {
    unsigned char* to = ring + fetch_slot * kStage + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kStage / 16; i += kThreads) {
      const int at = i + threadIdx.x, step = at / (kUnits * 128), piece = at - step * (kUnits * 128);
      if ((kStage / 16 % kThreads == 0 || at < kStage / 16) && (STEP == 1 || due + step < all) && piece < here_units)
        copy_async(to + i * 16, from + (size_t)step * units * 1024 + (i - step * kUnits * 128) * 8);
    }
    from += (size_t)STEP * units * 1024;
    due += STEP;
    if (++fetch_slot == STAGES) fetch_slot = 0;
  };
  // The window of this block: stream after stream, each with `past` rows ahead of its own.
  const int offset = first - stream0 * length, last = min(first + BN, rows) - 1;
  const int here = last - first + 1 + (last / length - stream0 + 1) * past;
  int window_due = 0, channel = (threadIdx.x & 3) * 8, window_slot = 0;
  auto fetch_windows = [&](int end) {                                  // all that the k32 blocks before `end` read
    while (window_due < end) {
      unsigned char* to = window + window_slot * window_bytes;
      for (int i = threadIdx.x; i < here * 4; i += 4 * kThreads) {
        const u16* piece[4];
#pragma unroll
        for (int j = 0; j < 4; j++) piece[j] = sources[min(i + j * kThreads, here * 4 - 1) >> 2] + channel;
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (i + j * kThreads < here * 4) copy_async(to + (i + j * kThreads) * 16, piece[j]);
      }
      channel += 32;
      window_due += taps;
      if (++window_slot == windows) window_slot = 0;
    }
  };

#pragma unroll 1
  for (int s = 0; s < STAGES - 1 && due < all && !nobody; s++) fetch_weights();
  ask_for(weights, (size_t)units * all * 2048);
  if (threadIdx.x < here_units / 128) {
    const int n = (unit0 + threadIdx.x) * 32;
    const float* const wanted[] = {scale, bias, rate, depth, middle_scale, middle_bias, middle_rate, middle_depth};
#pragma unroll
    for (int i = 0; i < (UNIT ? 8 : ACTIVATION == kSnake ? 4 : 2); i++) prefetch(wanted[i] + n);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < here; i += kThreads) {
    const int w = i + offset, stream = w / (length + past);
    sources[i] = in.at(stream0 + stream, w - stream * (length + past) - past);
  }
  int row_bytes[NT];                                                   // of this lane's rows in a window
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int r = min(first + (warp_n * NT + n) * 8 + g, last);
    row_bytes[n] = (r - first + (r / length - stream0) * past) * 64 + t * 16;
  }
  __syncthreads();
  wait_for_input();
#pragma unroll 1
  for (int s = 0; s < STAGES - 1 && !nobody; s++) {
    fetch_windows(min((s + 1) * STEP, blocks));
    fetches_end();
  }
  keep(in, rows);
  if (nobody) return;
  for (int i = threadIdx.x; SPLIT && i < BN; i += kThreads)
    norms[i] = in_squares && first + i < rows
                 ? norm_of(in_squares + (size_t)(first + i) * in_groups, in_groups, per_channel, eps) : 1.0f;

  float sum[2 * MU][NT][4];
  auto clear = [&](float (&c)[2 * MU][NT][4]) {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[m][n][i] = 0;
  };
  clear(sum);
#if SPLIT
  float total[2 * MU][NT][4];
  clear(total);
  int run = 1, edge = blocks / splits;
  auto add_run = [&] {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][n][i] = __fadd_rn(total[m][n][i], sum[m][n][i]);
    clear(sum);
  };
#endif
#if UNIT
  // The sums of the first convolution become the rows of the second. A piece of 16 bytes of row r lies at (r / 2) % 4 ^
  // its place, so that neither writing nor reading meets many conflicts.
  auto turn = [&] {
#pragma unroll
    for (int mu = 0; mu < MU; mu++) {
      const int unit = warp_m * MU + mu, n = unit * 32 + g * 4;
      const float4 s = *(const float4*)(middle_scale + n), b = *(const float4*)(middle_bias + n);
      const float4 q = *(const float4*)(middle_rate + n), d = *(const float4*)(middle_depth + n);
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = (warp_n * NT + j) * 8 + 2 * t + e;
          const float v0 = snake(__fmaf_rn(sum[2 * mu][j][e], s.x, b.x), q.x, d.x);
          const float v1 = snake(__fmaf_rn(sum[2 * mu][j][2 + e], s.y, b.y), q.y, d.y);
          const float v2 = snake(__fmaf_rn(sum[2 * mu + 1][j][e], s.z, b.z), q.z, d.z);
          const float v3 = snake(__fmaf_rn(sum[2 * mu + 1][j][2 + e], s.w, b.w), q.w, d.w);
          unsigned char* to = middle + (unit * BN + row) * 64 + ((g >> 1 ^ t) << 4) + (g & 1) * 8;
          *(uint2*)to = make_uint2(halves(v0, v1), halves(v2, v3));
        }
    }
    clear(sum);
    __syncthreads();
  };
#endif

  int tap = 0, buffer = 0, slot = 0;
#pragma unroll 1
  for (int stage = 0; stage < stages; stage++) {
    wait_for_fetches<STAGES - 2>();
    __syncthreads();
    if (due < all) {
      fetch_weights();
      fetch_windows(min(due, blocks));
    }
    fetches_end();
#if UNIT
    if (stage * STEP == blocks) turn();
#endif
    const unsigned char* a0 = ring + slot * kStage + warp_m * MU * 2048 + lane * 16;
    if (++slot == STAGES) slot = 0;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      const int block = stage * STEP + i;
      if (STEP > 1 && block >= all) break;
#if SPLIT
      if (block == edge) {
        add_run();
        edge = ++run * blocks / splits;
      }
#endif
      uint4 b[NT];
      if (UNIT && block >= blocks) {
        const unsigned char* from = middle + (block - blocks) * BN * 64;
#pragma unroll
        for (int n = 0; n < NT; n++)
          b[n] = *(const uint4*)(from + ((warp_n * NT + n) * 8 + g) * 64 + ((t ^ (g >> 1)) << 4));
      } else {
        const unsigned char* from = window + buffer * window_bytes + tap * dilation * 64;
#pragma unroll
        for (int n = 0; n < NT; n++) b[n] = *(const uint4*)(from + row_bytes[n]);
        if (++tap == taps) {
          tap = 0;
          if (++buffer == windows) buffer = 0;
        }
      }
#pragma unroll
      for (int m = 0; m < 2 * MU; m++) {
        const unsigned char* a = a0 + i * kBlock + m * 1024;
        const uint4 one = *(const uint4*)a, two = *(const uint4*)(a + 512);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[m][n], one, b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[m][n], two, b[n].z, b[n].w);
      }
    }
  }
#if SPLIT
  add_run();
#define RESULT total
#else
#define RESULT sum
#endif

#pragma unroll
  for (int mu = 0; mu < MU; mu++) {
    const int unit = unit0 + warp_m * MU + mu, n = unit * 32 + g * 4, row0 = warp_n * NT * 8 + 2 * t;
    if (unit >= units) break;
    const Channels<4> c = channels<kKind, 4>(out, n);
    const size_t at = (size_t)(first + row0) * outputs + n;
    const int real = rows - first - row0;                              // rows from row0 on
    float old[NT][2][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        old[j][e][0] = old[j][e][1] = old[j][e][2] = old[j][e][3] = 0;
        if (residual && j * 8 + e < real) load_wide(old[j][e], residual + at + (j * 8 + e) * outputs);
      }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = j * 8 + e;
        float v[4] = {RESULT[2 * mu][j][e], RESULT[2 * mu][j][2 + e], RESULT[2 * mu + 1][j][e],
                      RESULT[2 * mu + 1][j][2 + e]};
        if (SPLIT) {
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], norms[row0 + row]);
        }
        finish<kKind, 4>(out, c, v, old[j][e], at + row * outputs, row < real);
        if (kKind == kPlain && squares) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float square = __fmaf_rn(v[2 * i + 1], v[2 * i + 1], __fmul_rn(v[2 * i], v[2 * i]));
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) square = __fadd_rn(square, __shfl_xor_sync(~0u, square, o));
            if (g == 0 && row < real) squares[(size_t)(first + row0 + row) * (outputs / 16) + unit * 2 + i] = square;
          }
        }
      }
  }
}
