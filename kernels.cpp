// The walk of kernels.py in C++, for CPUs. Letters are those of kernels.py, but DP and EP are
// multiples of WIDE here.
//
// common/cpp.py translates a rule's Triton functions (weigh, slope, settle, lift) to C++ and
// inserts them at the line RULE, so no rule is written twice. A tile has BM rows and BN keys and is
// stored as (BN, BM). A vector holds the same number for LANES rows: a sum over keys is a sum of
// vectors, a mask a comparison.
//
// Forward: a task has ROWS rows of one head. It keeps the scores of BM rows and all their keys in
// the cache, because some rules read them several times. Backward: a task has KEYS keys, and visits
// every block of BM rows that sees them. At width 64 these keys take 512 KB with their gradients,
// which fits into most L2 caches. Tasks do not depend on the number of threads, and sums have a
// fixed order. So results are equal bit for bit.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
using std::max, std::min;

// --------------------------------------------------------------------------------- vectors of rows
#if defined(__AVX512F__)
constexpr int LANES = 16, TALL = 8;  // TALL: rows of a product that the registers hold
#elif defined(__AVX__)
constexpr int LANES = 8, TALL = 6;
#else
constexpr int LANES = 4, TALL = 6;
#endif
constexpr int WIDE = 2 * LANES;  // columns of a product that the registers hold
typedef float V __attribute__((vector_size(4 * LANES), may_alias));
typedef float Unaligned __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef int32_t M __attribute__((vector_size(4 * LANES), may_alias));
struct All {};  // the mask of a tile in which every row sees every key

static inline V splat(float x) { return V{} + x; }
static inline V where(M seen, V a, V b) { return seen ? a : b; }
static inline V where(All, V a, V) { return a; }
static inline V max(V a, V b) { return a > b ? a : b; }
static inline V min(V a, V b) { return a < b ? a : b; }
static inline V abs(V a) { return (V)((M)a & 0x7fffffff); }
static inline bool any(M found) {
    for (int m = 1; m < LANES; m++) found[0] |= found[m];
    return found[0];
}
static inline V exp2(V x) {
    // adding 1.5 * 2^23 rounds x to a whole n. 2^x = 2^n 2^f, with f in [-1/2, 1/2]
    const V n = max(min(x, splat(127)), splat(-126)) + 12582912.f - 12582912.f, f = x - n;
    V p = (1.5353362e-4f * f + 1.3398874e-3f) * f + 9.6184373e-3f;
    p = (((p * f + 5.5503324e-2f) * f + 2.4022648e-1f) * f + 6.9314720e-1f) * f + 1;
    return x < -126 ? V{} : p * (V)((__builtin_convertvector(n, M) + 127) << 23);
}
static inline V log2(V x) {
    const M e = ((M)x - 0x3f3504f3) >> 23;  // x = 2^e m, with m in [sqrt(1/2), sqrt(2))
    const V m = (V)((M)x - (e << 23)), y = (m - 1) / (m + 1), y2 = y * y;  // log m = 2 artanh y
    const V p = 1 + y2 * (1 / 3.f + y2 * (1 / 5.f + y2 * (1 / 7.f + y2 / 9)));
    const V finite = __builtin_convertvector(e, V) + 2.885390082f * y * p;
    return (x > 0) & (x < INFINITY) ? finite : x == 0 ? splat(-INFINITY) : x > 0 ? x : splat(NAN);
}

// RULE

constexpr int GROUPS = BM / LANES, ROWS = 512;  // vectors of a block; rows of a task of forward
// vector g of row j, where rows have N numbers; by default in a tile
static inline V& at(const float* x, int j, int g, int N = BM) {
    return *(V*)(x + j * N + g * LANES);
}
// C (rows, N) += A (rows, K) B (K, N), or = without add. A has any strides; N is a multiple of WIDE
// clang needs the pragma to keep the sums in registers; g++ ignores it and unrolls the loops itself
#define EACH_SUM _Pragma("unroll") for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++)
template <int R = TALL>
static void product(const float* A, long row, long col, const float* B, float* C, int rows, int N,
                    int K, bool add = true) {
    for (; rows >= R; rows -= R, A += R * row, C += R * N)
        for (int n = 0; n < N; n += WIDE) {
            V sum[R][2];
            EACH_SUM sum[r][h] = add ? at(C + n, r, h, N) : V{};
            for (int k = 0; k < K; k++)
                EACH_SUM sum[r][h] += A[r * row + k * col] * at(B + n, k, h, N);
            EACH_SUM at(C + n, r, h, N) = sum[r][h];
        }
    // the last rows, fewer at a time
    if (rows) product<R - (R > 1)>(A, row, col, B, C, rows, N, K, add);
}

// ----------------------------------------------------------------------------- what the walk reads
struct Matrix {  // (B, heads, T, width) or (B, heads, T), or null; the stride along the width is 1
    float* at;
    long batch, head, row;
};
struct Call {
    Matrix q, k, v, t, mix, r, o, u, d_o, dr, dq, dk, dv, dt, dmix;
    float *table, *dtable;  // (H, BN + T + BN), and (B, H, parts, BN + T + BN), 0 at first; or null
    int32_t* ends;          // (B or 1, T): the first row beyond those that see key j; null: T
    int32_t* sets;          // (B, T, 2): bit masks; a row sees no key that shares a bit; or null
    int8_t* alive;          // (B, heads, blocks, chunks): has a tile weights other than 0? or null
    // heads of the output; GK or GV heads share a key or value head, G share both; stride of ends
    long B, H, heads, GK, GV, G, T, D, E, ends_batch, threads;
    float scale;
};
static int count(long n, int size) { return (n + size - 1) / size; }
static int padded(long width) { return count(width, WIDE) * WIDE; }
static float& lane(const V* x, int m) { return ((float*)x)[m]; }
static void transpose(float* to, const float* from, int width, float factor) {  // to (width, BM)
    for (int m = 0; m < BM; m++)
        for (int d = 0; d < width; d++) to[d * BM + m] = from[m * padded(width) + d] * factor;
}
// a buffer of this thread, which its next task uses again
enum Use { Q, Q_T, K, VALUES, OUT, SUM_U, TILE_S, TILE_G, DO, DO_T, DQ, DK, DV };
template <Use>
static float* memory(long size) {
    static thread_local std::vector<V> held;
    if (held.size() < (size_t)count(size, LANES)) held.resize(count(size, LANES));
    return (float*)held.data();
}
enum Kind { SKIPPED, FULL, MASKED };  // of a tile: no row, every row, or some rows see its keys
struct Block {
    const Call& c;
    long batch, out;       // the head of the output
    int lo, end, size;     // the keys of its task, and how many k and v have room for
    int i0 = 0, last = 0;  // its rows
    const int DP = padded(c.D), EP = padded(c.E);
    float *k = memory<K>(VIEWS * long(size) * DP), *v = memory<VALUES>(long(size) * EP);
    float *q = memory<Q>(VIEWS * BM * DP), *qT = memory<Q_T>(VIEWS * BM * DP);
    V t[VIEWS][GROUPS], mix[GROUPS], r[GROUPS];
    M sets[2][GROUPS] = {};  // the halves of their bits
    // of backward
    float *dk = memory<DK>(VIEWS * KEYS * DP), *dq = memory<DQ>(VIEWS * BM * DP);
    float *dv = memory<DV>(KEYS * EP), *d_o = memory<DO>(BM * EP), *doT = memory<DO_T>(BM * EP);
    V dt[VIEWS][GROUPS] = {}, dmix[GROUPS] = {}, delta[GROUPS];

    long head(int view) const { return out * VIEWS + view; }
    long key(int view, int a) const { return (view * long(size) + a - lo) * DP; }  // place in k
    long value(int a) const { return long(a - lo) * EP; }
    int set(int j, int half) const { return c.sets[2 * (batch * c.T + j) + half]; }
    int unseen(int j) const { return c.ends ? c.ends[batch * c.ends_batch + j] : c.T; }
    int keys(int a) const { return min({BN, end - a, last + 1 - a}); }  // in the chunk from a on
    float* row(const Matrix& x, long head, long i) const {
        return x.at + batch * x.batch + head * x.head + i * x.row;
    }
    // rows i to i + n as (n, padded width); what lies beyond T or beyond the width is 0
    void load(float* to, const Matrix& x, long head, int i, int n, int width) const {
        std::fill_n(to, long(n) * padded(width), 0.f);
        for (int m = 0; m < min(long(n), c.T - i); m++)
            std::copy_n(row(x, head, i + m), width, to + long(m) * padded(width));
    }
    // factor times (n, padded width) in the place of rows i to i + n, or added to them
    void save(const float* from, const Matrix& x, long head, int i, int n, int width,
              float factor = 1, bool add = false) const {
        for (int m = 0; m < n; m++, from += padded(width))
            for (int d = 0; d < width; d++)
                row(x, head, i + m)[d] = from[d] * factor + (add ? row(x, head, i + m)[d] : 0);
    }
    void load_row(V* to, const Matrix& x, long head, float factor = 1) const {
        for (int m = 0; m < BM; m++)
            lane(to, m) = x.at && i0 + m <= last ? *row(x, head, i0 + m) * factor : 0;
    }
    void save_row(const V* from, const Matrix& x, long head, bool add = false) const {
        for (int m = 0; x.at && i0 + m <= last; m++)
            *row(x, head, i0 + m) = lane(from, m) + (add ? *row(x, head, i0 + m) : 0);
    }
    void load_keys() {
        load(v, c.v, out / c.GV, lo, end - lo, c.E);
        for (int view = 0; view < VIEWS; view++)
            load(k + key(view, lo), c.k, head(view) / c.GK, lo, end - lo, c.D);
    }
    void load_rows(int i) {
        i0 = i;
        last = min(i + long(BM), c.T) - 1;
        load_row(mix, c.mix, out);
        for (int m = 0; c.sets && i + m <= last; m++)
            for (int half : {0, 1}) sets[half][m / LANES][m % LANES] = set(i + m, half);
        for (int view = 0; view < VIEWS; view++) {
            load_row(t[view], c.t, head(view));
            load(q + view * BM * DP, c.q, head(view), i, BM, c.D);
            transpose(qT + view * BM * DP, q + view * BM * DP, c.D, c.scale * UNIT);
        }
    }
    int8_t* alive(int a) const {
        const long block = (batch * c.heads + out) * count(c.T, BM) + i0 / BM;
        return SKIP && c.alive ? c.alive + block * count(c.T, BN) + a / BN : nullptr;
    }
    Kind kind(int a) const {
        int first = c.T, final = c.ends ? 0 : c.T;
        for (int j = a; c.ends && j < a + keys(a); j++) {
            first = min(first, unseen(j));
            final = max(final, unseen(j));
        }
        if (keys(a) <= 0 || final <= i0) return SKIPPED;
        return a + BN - 1 <= i0 && first >= i0 + BM && !c.sets ? FULL : MASKED;
    }
    // step(j, mask) for a group of rows and the keys a + j of a chunk
    template <class Step>
    void walk(int g, int a, Step step) const {
        const Kind kind = this->kind(a);
        M i;
        for (int m = 0; m < LANES; m++) i[m] = i0 + g * LANES + m;
        for (int j = 0; kind == FULL && j < keys(a); j++) step(j, All{});
        for (int j = 0; kind == MASKED && j < keys(a); j++) {
            M seen = (i >= a + j) & (i < unseen(a + j));
            if (c.sets) seen &= ((sets[0][g] & set(a + j, 0)) | (sets[1][g] & set(a + j, 1))) == 0;
            step(j, seen);
        }
    }
    void tile_scores(int view, int a, float* s) const {  // in the rule's unit
        product(k + key(view, a), DP, 1, qT + view * BM * DP, s, keys(a), BM, c.D, false);
        const float* bias = c.table + head(view) * (c.T + 2 * BN) + BN + i0 - a;
        for (int j = 0; c.table && j < keys(a); j++)
            for (int g = 0; g < GROUPS; g++)
                at(s, j, g) += UNIT * *(const Unaligned*)(bias + g * LANES - j);
    }
};

// ----------------------------------------------------------------------------------------- forward
// The statistic of vector g of a block's rows, from the block's scores s (keys, BM). Online rules
// get the maximum, and their statistic with the output
static V statistic(const Block& b, int g, float* s) {
    const V t = b.t[0][g];
    V r = splat(FLOOR), w, z, u, sum_w, sum_z;
    auto walk = [&](auto step) {
        for (int a = b.lo; a <= b.last; a += BN)
            b.walk(g, a, [&](int j, auto seen) { step(lift(at(s, a - b.lo + j, g), t), seen); });
    };
    if (ONLINE || PASSES) walk([&](V s, auto seen) { r = max(r, where(seen, s, r)); });
    for (int pass = 0; pass < PASSES; pass++) {
        sum_w = sum_z = V{};
        walk([&](V s, auto seen) {
            weigh(s, r, t, w, z, u);
            sum_w += where(seen, w, V{});
            sum_z += where(seen, z, V{});
        });
        const V before = r;
        r = pass ? settle<false>(r, t, sum_w, sum_z) : settle<true>(r, t, sum_w, sum_z);
        if (pass && !any((r - before) * sum_z > 1e-6f)) break;
    }
    return r;
}
static void forward_block(Block& b) {
    const Call& c = b.c;
    const long size = count(b.last + 1 - b.lo, BN) * BN * BM;
    const bool save_u = SAVE_U && c.u.at;
    float *s = memory<TILE_S>(VIEWS * size), *u = memory<TILE_G>(BN * BM);
    float *o = memory<OUT>(BM * b.EP), *sum_u = memory<SUM_U>(BM * b.EP);
    V sum_w[GROUPS] = {}, sum_z[GROUPS] = {}, of_o[GROUPS], of_u[GROUPS];
    for (int view = 0; view < VIEWS; view++)
        for (int a = b.lo; a <= b.last; a += BN)
            if (b.kind(a) != SKIPPED) b.tile_scores(view, a, s + view * size + (a - b.lo) * BM);
    for (int g = 0; g < GROUPS; g++) b.r[g] = statistic(b, g, s);
    for (float* x : {o, sum_u}) std::fill_n(x, BM * b.EP, 0.f);
    for (int a = b.lo; a <= b.last; a += BN, s += BN * BM) {
        M alive{};
        for (int g = 0; g < GROUPS; g++) b.walk(g, a, [&](int j, auto seen) {
            V sum{}, w, z, u_;  // sum: over the views
            for (int view = 0; view < VIEWS; view++) {
                const V t = b.t[view][g];
                weigh(lift(at(s + view * size, j, g), t), b.r[g], t, w, z, u_);
                w = where(seen, w, V{});
                sum += view ? -b.mix[g] * w : w;
                alive |= SKIP ? w > 0 : M{} - 1;
                sum_z[g] += where(seen, z, V{});
                if (SAVE_U) at(u, j, g) = where(seen, u_, V{});
            }
            sum_w[g] += sum;
            at(s, j, g) = sum;
        });
        if (b.alive(a)) *b.alive(a) = any(alive);
        if (!any(alive)) continue;
        product(s, 1, BM, b.v + b.value(a), o, BM, b.EP, b.keys(a));
        if (save_u) product(u, 1, BM, b.v + b.value(a), sum_u, BM, b.EP, b.keys(a));
    }
    for (int g = 0; g < GROUPS; g++) {
        const V top = b.r[g];
        if (SETTLES && !PASSES) b.r[g] = settle<true>(top, b.t[0][g], sum_w[g], sum_z[g]);
        of_u[g] = 1 / max(sum_z[g], splat(1e-30f));
        of_o[g] = ONLINE ? exp2(top - b.r[g]) : splat(1);
        // r is rounded: sums may miss 1 by 1e-4
        if (PASSES > 1) of_o[g] = 1 / max(sum_w[g], splat(1e-30f));
        b.r[g] *= PLAIN_SUM ? 1 : 1 / UNIT;
    }
    b.save_row(b.r, c.r, b.out);
    for (int m = 0; b.i0 + m <= b.last; m++) {
        b.save(o + m * b.EP, c.o, b.out, b.i0 + m, 1, c.E, lane(of_o, m));
        if (save_u) b.save(sum_u + m * b.EP, c.u, b.out, b.i0 + m, 1, c.E, lane(of_u, m));
    }
}
extern "C" void forward(const Call& c) {
    const long parts = count(c.T, ROWS);
    std::atomic<long> next{0};
#pragma omp parallel num_threads(c.threads)
    for (long task; (task = next++) < c.B * c.heads * parts;) {  // ROWS rows, the last ones first
        const int first = (parts - 1 - task % parts) * ROWS, end = min(first + long(ROWS), c.T);
        Block b{c, task / parts / c.heads, task / parts % c.heads, 0, end, end, first, end - 1};
        while (b.kind(b.lo) == SKIPPED) b.lo += BN;  // before the first row's keys
        b.load_keys();
        for (int i = first; i < end; i += BM) {
            b.load_rows(i);
            forward_block(b);
        }
    }
}

// ---------------------------------------------------------------------------------------- backward
// the tiles w (BN, BM) and ds (VIEWS, BN, BM); before, they hold g and s
static void score_gradients(Block& b, int a, float* tile_w, float* tile_ds) {
    for (int view = 0; view < VIEWS; view++) b.tile_scores(view, a, tile_ds + view * BN * BM);
    product(b.v + b.value(a), b.EP, 1, b.doT, tile_w, b.keys(a), BM, b.c.E, false);
    for (int n = 0; n < GROUPS; n++) b.walk(n, a, [&](int j, auto seen) {
        const V g = at(tile_w, j, n);
        V sum{}, w, z, u, ds, dt;
        for (int view = 0; view < VIEWS; view++) {
            V &s = at(tile_ds + view * BN * BM, j, n), t = b.t[view][n];
            const V f = view ? -b.mix[n] : splat(1);
            weigh(lift(s, t), b.r[n], t, w, z, u);
            slope(s, b.r[n], t, f * g, b.delta[n], ds, dt);
            w = where(seen, w, V{});
            s = where(seen, ds, V{});
            sum += f * w;
            b.dt[view][n] += where(seen, dt, V{});
            b.dmix[n] -= view ? w * g : V{};
        }
        at(tile_w, j, n) = sum;
    });
}
// Sums of ds by distance. d visits every distance once, in steps of LANES, so that no load waits
// for a store that overlaps it
static void add_to_table(const Block& b, int a, float* ds, float* dtable) {
    for (int d = 1 - BN, n = 0; n < BN + BM - 1; n++, d += LANES) {  // row minus key, in the tile
        if (d >= BM) d -= count(BN + BM - 1, LANES) * LANES - 1;
        V sum{};
        for (int g = max(0, count(d, LANES)); g < GROUPS && g * LANES - d < b.keys(a); g++)
            sum += at(ds, g * LANES - d, g);
        *(Unaligned*)(dtable + BN + b.i0 - a + d) += sum;
    }
}
static void backward_block(Block& b, int i, int part, std::atomic<int>& added) {
    const Call& c = b.c;
    const long parts = count(c.T, KEYS);
    float *w = memory<TILE_G>(BN * BM), *ds = memory<TILE_S>(VIEWS * BN * BM);
    b.load_rows(i);
    b.load_row(b.r, c.r, b.out, PLAIN_SUM ? 1 : UNIT);
    b.load(b.d_o, c.d_o, b.out, i, BM, c.E);
    transpose(b.doT, b.d_o, c.E, 1);
    std::fill_n(b.dt[0], VIEWS * GROUPS, V{});
    std::fill_n(b.dmix, GROUPS, V{});
    std::fill_n(b.dq, VIEWS * BM * b.DP, 0.f);
    b.load_row(b.delta, c.dr, b.out, -1);  // delta_i = do_i . U_i - dr_i, or -dr_i
    for (int m = 0; SETTLES && !PLAIN_SUM && i + m <= b.last; m++)
        for (int e = 0; e < c.E; e++)
            lane(b.delta, m) += b.d_o[m * b.EP + e] * b.row(c.u, b.out, i + m)[e];
    for (int a = b.lo; a < b.end && a <= b.last; a += BN) {
        if (b.kind(a) == SKIPPED || (b.alive(a) && !*b.alive(a))) continue;
        score_gradients(b, a, w, ds);
        product(w, BM, 1, b.d_o, b.dv + b.value(a), b.keys(a), b.EP, BM);
        for (int view = 0; view < VIEWS; view++) {
            const long q = view * BM * b.DP, k = b.key(view, a);
            float* of_view = ds + view * BN * BM;
            product(of_view, BM, 1, b.q + q, b.dk + k, b.keys(a), b.DP, BM);
            product(of_view, 1, BM, b.k + k, b.dq + q, BM, b.DP, b.keys(a));
            const long place = (b.batch * c.H + b.head(view)) * parts + part;
            if (c.dtable) add_to_table(b, a, of_view, c.dtable + place * (c.T + 2 * BN));
        }
    }
    // dq, dt and dmix are sums over keys. Tasks add theirs in order, whatever the threads. An
    // earlier task has been taken before, so it ends
    while (added < part) std::this_thread::yield();
    for (int view = 0; view < VIEWS; view++) {
        float* dq = b.dq + view * BM * b.DP;
        b.save(dq, c.dq, b.head(view), i, b.last + 1 - i, c.D, c.scale, part);
        b.save_row(b.dt[view], c.dt, b.head(view), part);
    }
    b.save_row(b.dmix, c.dmix, b.out, part);
    added = part + 1;
}
extern "C" void backward(const Call& c) {
    const long parts = count(c.T, KEYS), groups = c.heads / c.G, blocks = count(c.T, BM);
    std::vector<std::atomic<int>> added(c.B * c.heads * blocks);  // by how many tasks, to a block
    std::atomic<long> next{0};
#pragma omp parallel num_threads(c.threads)
    for (long task; (task = next++) < c.B * groups * parts;) {  // KEYS keys, which G heads share
        const int part = task % parts, lo = part * KEYS, end = min(lo + long(KEYS), c.T);
        const long group = task / parts % groups, batch = task / parts / groups;
        Block b{c, batch, group * c.G, lo, end, KEYS};
        b.load_keys();
        std::fill_n(b.dk, VIEWS * KEYS * b.DP, 0.f);
        std::fill_n(b.dv, KEYS * b.EP, 0.f);
        for (; b.out < (group + 1) * c.G; b.out++)
            for (int n = blocks - 1; n >= lo / BM; n--)
                backward_block(b, n * BM, part, added[(batch * c.heads + b.out) * blocks + n]);
        for (int view = 0; view < VIEWS; view++)
            b.save(b.dk + b.key(view, lo), c.dk, group * VIEWS + view, lo, end - lo, c.D, c.scale);
        b.save(b.dv, c.dv, group, lo, end - lo, c.E);
    }
}
