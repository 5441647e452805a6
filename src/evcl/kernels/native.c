// The elementwise parts of a training step, in one pass over memory instead of one per operation.
// native.py compiles it if there is a compiler; without it, evcl/nn/chain.py and evcl/training/rules/update.py do the same.

#include <math.h>
#include <stdint.h>
#include <string.h>

// e^x for |x| < 87, to two units in the last place; written by hand so that a compiler can vectorise it.
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;  // NaN stays NaN
    float k = rintf(x * 1.44269504f);
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// log x, to three units in the last place; NaN unless x is above 0 and finite.
static inline float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t k = (bits - 0x3f3504f3) >> 23;  // x = 2^k m with m between sqrt(1/2) and sqrt(2)
    bits -= k << 23;
    float m;
    memcpy(&m, &bits, 4);
    float r = m - 1.0f, z = r * r;
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    float found = p * r * z - 0.5f * z + r + (float)k * 0.69314718f;
    return x > 0.0f && x < INFINITY ? found : NAN;
}

// One step of Adam on means: g + a (w - c). `rate` and `root` hold the bias corrections.
void update_mean(float rate, float root, long n, float *restrict w, float *restrict first, float *restrict second,
                 const float *restrict grad, const float *restrict a, const float *restrict c) {
    for (long i = 0; i < n; i++) {
        float g = grad[i] + a[i] * (w[i] - c[i]);
        float m = 0.9f * first[i] + 0.1f * g, s = 0.999f * second[i] + 0.001f * g * g;
        first[i] = m;
        second[i] = s;
        w[i] -= rate * m / (sqrtf(s) * root + 1e-8f);
    }
}

// The same on log sigmas: g v + k (v - s) + d v (v - u). It also updates the variance v = e^(2 w).
void update_log_std(float rate, float root, long n, float *restrict w, float *restrict first, float *restrict second,
                    const float *restrict grad, float *restrict variance, const float *restrict k,
                    const float *restrict c, const float *restrict d, const float *restrict u) {
    for (long i = 0; i < n; i++) {
        float v = variance[i];
        float g = grad[i] * v + k[i] * (v - c[i]) + d[i] * v * (v - u[i]);
        float m = 0.9f * first[i] + 0.1f * g, s = 0.999f * second[i] + 0.001f * g * g;
        first[i] = m;
        second[i] = s;
        float move = rate * m / (sqrtf(s) * root + 1e-8f);
        float next = w[i] - move;
        w[i] = next;
        variance[i] = move == 0.0f ? v : exponential(2.0f * next);  // a weight that does not move keeps its variance, to the last bit
    }
}

// The natural step on log sigmas (see training/rules.py): the curvature is the mean of v times the gradient, over the mean
// of v; `newest` is the weight of this step in both.
void update_natural(float rate, float newest, long n, float *restrict w, float *restrict measured, float *restrict mean_variance,
                    const float *restrict grad, float *restrict variance, const float *restrict k,
                    const float *restrict s, const float *restrict d, const float *restrict u) {
    for (long i = 0; i < n; i++) {
        float v = variance[i];
        float sum = measured[i] + newest * (v * grad[i] - measured[i]);
        float all = mean_variance[i] + newest * (v - mean_variance[i]);
        measured[i] = sum;
        mean_variance[i] = all;
        float h = fabsf(sum / all);
        float stiff = k[i] + h + d[i] * (v - u[i]), least = 0.1f * k[i];
        stiff = stiff < least ? least : stiff;
        float move = 0.5f * rate * logarithm(k[i] / stiff * (s[i] / v));
        float next = w[i] + move;
        w[i] = next;
        variance[i] = move == 0.0f ? v : exponential(2.0f * next);
    }
}

// Replaces m by y = relu(m + t v) and eps by t = eps / sqrt(v), and computes the square of y.
void activate(long n, float *restrict y, float *restrict square, float *restrict t, const float *restrict v) {
    for (long i = 0; i < n; i++) {
        float spread = v[i] < 1e-30f ? 1e-30f : v[i];
        float ratio = t[i] / sqrtf(spread);
        float out = y[i] + ratio * spread;
        out = out < 0.0f ? 0.0f : out;  // NaN stays NaN
        t[i] = ratio;
        y[i] = out;
        square[i] = out * out;
    }
}

// g = d + y e where y > 0, and h = g t.
void pass_on(long n, float *restrict g, float *restrict h, const float *restrict d, const float *restrict e,
             const float *restrict y, const float *restrict t) {
    for (long i = 0; i < n; i++) {
        float out = y[i] > 0.0f ? d[i] + y[i] * e[i] : 0.0f;
        g[i] = out;
        h[i] = out * t[i];
    }
}

// One row of logits, that of one example: replaces eps by t = eps / sqrt(v), and computes z = m + t v (z = m without v),
// the NLL of its label, the gradient g of the mean over n examples, and h = g t. Uses only classes `begin` to `end`.
static inline float row_loss(long classes, long begin, long end, long label, float n, const float *m, const float *v,
                             float *t, float *g, float *h) {
    float top = -INFINITY, total = 0.0f;
    for (long c = begin; c < end; c++) {
        float z = m[c];
        if (v) {
            float spread = v[c] < 1e-30f ? 1e-30f : v[c];
            t[c] /= sqrtf(spread);
            z += t[c] * spread;
        }
        g[c] = z;
        top = z > top ? z : top;
    }
    float nll = -g[label];
    for (long c = begin; c < end; c++) total += g[c] = exponential(g[c] - top);
    for (long c = 0; c < classes; c++) {
        float out = c < begin || c >= end ? 0.0f : (g[c] / total - (c == label)) / n;
        g[c] = out;
        if (v) h[c] = out * t[c];
    }
    return nll + top + logf(total);
}

// The mean NLL of n examples. If `columns` is null, all classes are used; if `weights` is null, all examples weigh 1.
void loss(long n, long classes, const int64_t *labels, const int64_t *columns, const float *weights, float *nll,
          const float *m, const float *v, float *t, float *g, float *h) {
    double sum = 0.0;
    for (long i = 0; i < n; i++) {
        long at = i * classes, begin = columns ? columns[2 * i] : 0, end = columns ? columns[2 * i + 1] : classes;
        float w = weights ? weights[i] : 1.0f;
        sum += w * row_loss(classes, begin, end, labels[i], n / w, m + at, v ? v + at : v, t + at, g + at, h + at);
    }
    *nll = (float)(sum / n);
}

// One row of logits z: adds the gradients of w T^2 KL(q || softmax(z / T)), averaged over n examples, to each head's
// columns of g, and returns the sum of these terms; `told` is sum q log q of each head. z is overwritten.
static inline float row_lesson(long heads, const int64_t *spans, float warm, const float *strengths, float n,
                               const float *q, const float *told, float *z, float *g) {
    float found = 0.0f, cold = 1.0f / warm;
    for (long k = 0; k < heads; k++) {
        long begin = spans[2 * k], end = spans[2 * k + 1];
        float top = -INFINITY, total = 0.0f, cross = 0.0f, scale = strengths[k] * warm / n;
        for (long c = begin; c < end; c++) top = z[c] > top ? z[c] : top;
        for (long c = begin; c < end; c++) {
            float u = (z[c] - top) * cold;
            cross += q[c] * u;
            total += z[c] = exponential(u);
        }
        found += strengths[k] * (told[k] - cross + logarithm(total));
        for (long c = begin; c < end; c++) g[c] += scale * (z[c] / total - q[c]);
    }
    return warm * warm * found;
}

// `loss` with distillation. The classes after the first `own` belong to heads that are only distilled, and `taught`
// receives the mean distillation loss. q and `told` have one row per example of the data, and so have `strengths` if
// `each` is 1; `rows` are those of this batch. m is overwritten.
void loss_and_lessons(long n, long classes, long own, long heads, long each, const int64_t *labels, const int64_t *columns,
                      const float *weights, float *nll, float *m, const float *v, float *t, float *g, float *h,
                      const int64_t *rows, const float *q, const float *told, const int64_t *spans, const float *warm,
                      const float *strengths, float *taught) {
    double sum = 0.0, lessons = 0.0;
    if (v)
        for (long i = 0; i < n * classes; i++) {
            float spread = v[i] < 1e-30f ? 1e-30f : v[i];
            t[i] /= sqrtf(spread);
            m[i] += t[i] * spread;
        }
    for (long i = 0; i < n; i++) {
        long at = i * classes, begin = columns ? columns[2 * i] : 0, end = columns ? columns[2 * i + 1] : own;
        float w = weights ? weights[i] : 1.0f;
        sum += w * row_loss(classes, begin, end, labels[i], n / w, m + at, 0, t + at, g + at, h + at);
        lessons += row_lesson(heads, spans, *warm, strengths + each * rows[i] * heads, n, q + rows[i] * classes,
                              told + rows[i] * heads, m + at, g + at);
    }
    if (v)
        for (long i = 0; i < n * classes; i++) h[i] = g[i] * t[i];
    *nll = (float)(sum / n);
    *taught = (float)(lessons / n);
}

// Copies the rows of x listed in `rows`, and their squares unless `square` is null.
void take(long n, long width, const int64_t *rows, const float *restrict x, float *restrict out,
          float *restrict square) {
    for (long i = 0; i < n; i++) {
        const float *from = x + rows[i] * width;
        for (long j = 0; j < width; j++) out[i * width + j] = from[j];
        if (square)
            for (long j = 0; j < width; j++) square[i * width + j] = from[j] * from[j];
    }
}
