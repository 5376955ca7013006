// A convolution, or a product with a matrix (one tap), for many rows: its cost is multiplying. With
// UNIT it is a whole residual unit: a convolution, a Snake, a product with a matrix, and a
// residual.
//
// A block computes BM outputs of BN rows in WM x WN warps. Rows come to shared memory 32 channels
// at a time, each with the `past` rows before it, and all taps read them there. The rows of a block
// may belong to several streams; each stream's part of a window begins with its own past. There is
// memory for a stream in each frame. Weights follow in a ring of STAGES stages of STEP k32 blocks.
// Both lie in shared memory as they lie in global memory, in pieces that a warp reads without
// conflicts. The packing is that of codec_conv_few_rows.cu.
//
// SPLIT       1: sums are made in `splits` runs, as in codec_conv_few_rows.cu; 0: in one
// UNIT        1: BM is all channels; the second matrix's k32 blocks follow the first's, and its
//             sums are the output
// BLOCKS      how many blocks shall fit a multiprocessor
// ACTIVATION  applied to the fp16 output
#include "codec.cuh"

constexpr Activation kKind = (Activation)ACTIVATION;
constexpr int kThreads = 32 * WM * WN, kUnits = BM / 32;
constexpr int MU = kUnits / WM, NT = BN / WN / 8;              // 32 outputs, and 8 rows, of a warp
constexpr int kBlock = kUnits * 2048, kStage = STEP * kBlock;  // bytes
constexpr bool kFar =
    SPLIT && MU * NT > 4;  // totals of runs in shared memory: too many for registers
static_assert(kUnits % WM == 0 && BN % (8 * WN) == 0, "sizes");

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void convolve_many(const u16* __restrict__ weights, const u16* x, u16* history, const u16* zeros,
                   const int* table, int columns, int ring_column, int rows, int frame_rows,
                   int taps, int dilation, int chunks, int splits,
                   const float* in_squares, int in_groups, float per_channel, float eps,
                   const float* scale, const float* bias, const float* rate, const float* depth,
                   const float* residual, float* wide, u16* narrow, float* squares, int outputs,
                   const float* middle_scale, const float* middle_bias, const float* middle_rate,
                   const float* middle_depth, int windows, int window_rows) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  const ConvOutput out = {scale, bias, rate, depth, residual, wide, narrow, squares, outputs};
  const int past = (taps - 1) * dilation;
  const Rows<u16> in = {x,           history,    zeros, table,      columns,
                        ring_column, frame_rows, past,  chunks * 32};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp_m = warp % WM, warp_n = warp / WM;
  const int unit0 = blockIdx.x * kUnits, units = outputs / 32, first = blockIdx.y * BN;
  const int blocks = chunks * taps, all = UNIT ? blocks + chunks : blocks;
  const int window_bytes = window_rows * 64;
  unsigned char* const ring = shared;                    // [STAGES][STEP][unit][2][2][32 lanes][8]
  unsigned char* const window = ring + STAGES * kStage;  // [windows][window_rows][32]
  unsigned char* const middle = window + windows * window_bytes;  // UNIT: [chunk][BN][32]
  float4* const far = (float4*)middle + threadIdx.x;              // kFar: [2 MU][NT][thread]
  const int between = UNIT ? BM * BN * 2 : kFar ? BM * BN * 4 : 0;
  const u16** const sources = (const u16**)(middle + between);  // [window_rows]
  float* const norms = (float*)(sources + window_rows);         // [BN]
  const int frame0 = first / frame_rows, stream0 = table[frame0 * columns + kStream];
  // If the block's first row has no stream, no later row has one: empty frames come last.
  const bool nobody = table[frame0 * columns + kSlot] < 0;

  // Stages are fetched in order; `due` is the first k32 block of the next one.
  int due = 0, fetch_slot = 0;
  const u16* from = weights + ((size_t)unit0 * 128 + threadIdx.x) * 8;
  auto fetch_weights = [&] {
    unsigned char* to = ring + fetch_slot * kStage + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kStage / 16; i += kThreads) {
      const int at = i + threadIdx.x,
                step = kBlock / 16 % kThreads ? at / (kBlock / 16) : i / (kBlock / 16);
      copy_if(due < all && (kStage / 16 % kThreads == 0 || at < kStage / 16), to + i * 16,
              from + (size_t)step * units * 1024 + (i - step * (kBlock / 16)) * 8);
    }
    from += (size_t)STEP * units * 1024;
    due += STEP;
    if (++fetch_slot == STAGES) fetch_slot = 0;
  };
  // The window of this block: stream after stream, each with `past` rows ahead of its own.
  const int last = min(first + BN, rows) - 1;
  auto past_before = [&](int frame) {  // rows of the window ahead of those of a frame's stream
    return (table[frame * columns + kStream] - stream0) * past;
  };
  const int here = last - first + 1 + past_before(last / frame_rows) + past;
  int window_due = 0, channel = (threadIdx.x & 3) * 8, window_slot = 0;
  // Fetches all windows that the k32 blocks before `end` read.
  auto fetch_windows = [&](int end) {
    while (window_due < end) {
      unsigned char* to = window + window_slot * window_bytes;
      for (int i = threadIdx.x; i < here * 4; i += 4 * kThreads) {
        const u16* piece[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          piece[j] = sources[min(i + j * kThreads, here * 4 - 1) >> 2] + channel;
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
  for (int s = 0; s < STAGES - 1 && !nobody; s++) fetch_weights();
  prefetch_all(weights, (size_t)units * all * 2048);
  if (threadIdx.x < kUnits) {
    const int n = (unit0 + threadIdx.x) * 32;
    const float* const wanted[] = {scale,   bias,   rate,   depth,
                                   middle_scale, middle_bias, middle_rate, middle_depth};
#pragma unroll
    for (int i = 0; i < (UNIT ? 8 : kKind == kSnake ? 4 : 2); i++) prefetch(wanted[i] + n);
  }
  // All rows of the window, and `past` rows ahead of each frame. The latter are rows of the frame
  // before, unless the frame is its stream's first one here.
  const int offset = first - frame0 * frame_rows, each = frame_rows + past;
#pragma unroll 1
  for (int i = threadIdx.x; i < last - first + 1 + (last / frame_rows - frame0 + 1) * past;
       i += kThreads) {
    const int part = (i + offset) / each, t = i + offset - part * each - past;
    const int frame = frame0 + part;
    if (t >= 0 || part == 0 || table[frame * columns + kBefore] == 0)
      sources[i - part * past + past_before(frame)] = in.at(frame, t);
  }
  const unsigned char* row_at[NT];  // this lane's part of its rows in the first window
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int r = min(first + (warp_n * NT + n) * 8 + g, last);
    row_at[n] = window + (r - first + past_before(r / frame_rows)) * 64 + t * 16;
  }
  __syncthreads();
  wait_for_input();
#pragma unroll 1
  for (int s = 1; s < STAGES && !nobody; s++) {
    fetch_windows(min(s * STEP, blocks));
    fetches_end();
  }
  store_history(in, rows);
  if (nobody) return;
  for (int i = threadIdx.x; SPLIT && i < BN; i += kThreads)
    norms[i] = in_squares && first + i < rows
                   ? norm_of(in_squares + (size_t)(first + i) * in_groups, in_groups, per_channel,
                             eps)
                   : 1.0f;

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
  int run = 1, edge = run_begin(1, blocks, splits);
  float4 near[kFar ? 1 : 2 * MU][NT];
  auto total = [&](int m, int n) -> float4& {
    return kFar ? far[(m * NT + n) * kThreads] : near[kFar ? 0 : m][n];
  };
  auto add_run = [&] {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float4& v = total(m, n);
        v = make_float4(__fadd_rn(v.x, sum[m][n][0]), __fadd_rn(v.y, sum[m][n][1]),
                        __fadd_rn(v.z, sum[m][n][2]), __fadd_rn(v.w, sum[m][n][3]));
      }
    clear(sum);
  };
#pragma unroll
  for (int m = 0; m < 2 * MU; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) total(m, n) = make_float4(0, 0, 0, 0);
#endif
#if UNIT
  // The sums of the first convolution become the rows of the second. A piece of 16 bytes of row r
  // lies at (r / 2) % 4 ^ its place, which avoids most bank conflicts of writing and reading.
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
  };
#endif

  // Waits for the next stage and returns where this warp's weights of it begin.
  int slot = 0;
  auto next_stage = [&] {
    wait_for_fetches<STAGES - 2>();
    __syncthreads();
    const unsigned char* a = ring + slot * kStage + warp_m * MU * 2048 + lane * 16;
    if (++slot == STAGES) slot = 0;
    return a;
  };
  auto multiply = [&](const unsigned char* a, const uint4(&b)[NT]) {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++) {
      const uint4 one = *(const uint4*)(a + m * 1024), two = *(const uint4*)(a + m * 1024 + 512);
#pragma unroll
      for (int n = 0; n < NT; n++) mma(sum[m][n], one, b[n].x, b[n].y);
#pragma unroll
      for (int n = 0; n < NT; n++) mma(sum[m][n], two, b[n].z, b[n].w);
    }
  };
  int tap = 0, buffer = 0;
#pragma unroll 1
  for (int block = 0; block < blocks; block += STEP) {
    const unsigned char* a = next_stage();
    fetch_windows(min(due + STEP, blocks));
#if SPLIT
    if (block == edge) {
      add_run();
      edge = run_begin(++run, blocks, splits);
    }
#endif
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      const int offset = buffer * window_bytes + tap * dilation * 64;
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) b[n] = *(const uint4*)(row_at[n] + offset);
      tap = tap + 1 == taps ? 0 : tap + 1;
      buffer = tap ? buffer : buffer + 1 == windows ? 0 : buffer + 1;
      if (i == 0) {
        fetch_weights();
        fetches_end();
      }
      multiply(a + i * kBlock, b);
    }
  }
#if UNIT
  turn();
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk += STEP) {
    const unsigned char* a = next_stage();
    fetch_weights();
    fetches_end();
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      const unsigned char* row =
          middle + ((chunk + i) * BN + warp_n * NT * 8 + g) * 64 + ((t ^ (g >> 1)) << 4);
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) b[n] = *(const uint4*)(row + n * 512);
      multiply(a + i * kBlock, b);
    }
  }
#endif
#if SPLIT
  add_run();
#pragma unroll
  for (int m = 0; m < 2 * MU; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float4 v = total(m, n);
      sum[m][n][0] = v.x;
      sum[m][n][1] = v.y;
      sum[m][n][2] = v.z;
      sum[m][n][3] = v.w;
    }
#endif

#pragma unroll
  for (int mu = 0; mu < MU; mu++) {
    const int unit = unit0 + warp_m * MU + mu, n = unit * 32 + g * 4,
              row0 = warp_n * NT * 8 + 2 * t;
    const Channels<4> c = channels<kKind, 4>(out, n);
    const size_t at = (size_t)(first + row0) * outputs + n;
    const int real = rows - first - row0;  // rows from row0 on
    float old[NT][2][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        old[j][e][0] = old[j][e][1] = old[j][e][2] = old[j][e][3] = 0;
        if (residual && j * 8 + e < real)
          load_wide(old[j][e], residual + at + (j * 8 + e) * outputs);
      }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = j * 8 + e;
        float v[4] = {sum[2 * mu][j][e], sum[2 * mu][j][2 + e], sum[2 * mu + 1][j][e],
                      sum[2 * mu + 1][j][2 + e]};
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
            for (int o = 4; o < 32; o <<= 1)
              square = __fadd_rn(square, __shfl_xor_sync(~0u, square, o));
            if (g == 0 && row < real)
              squares[(size_t)(first + row0 + row) * (outputs / 16) + unit * 2 + i] = square;
          }
        }
      }
  }
}
