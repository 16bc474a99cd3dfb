/* Log lines of the data plane: a bounded queue that the control plane empties. C threads never write to the journal themselves. */
#include "_volume_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

void volume_log(struct volume *v, enum volume_severity severity, const char *format, ...)
{
    struct log_queue *q = &v->log;
    va_list arguments;

    va_start(arguments, format);
    pthread_mutex_lock(&q->mutex);
    if (q->count == LOG_LINES) {                /* a flood must not push memory up; the newest lines matter most */
        q->first = (q->first + 1) % LOG_LINES;
        q->count--;
    }
    unsigned last = (q->first + q->count++) % LOG_LINES;
    q->severity[last] = severity;
    vsnprintf(q->line[last], LOG_LINE_SIZE, format, arguments);
    pthread_mutex_unlock(&q->mutex);
    va_end(arguments);
}

bool volume_next_log_line(struct volume *v, enum volume_severity *severity, char *line, size_t size)
{
    struct log_queue *q = &v->log;
    bool found;

    pthread_mutex_lock(&q->mutex);
    found = q->count > 0;
    if (found) {
        *severity = q->severity[q->first];
        snprintf(line, size, "%s", q->line[q->first]);
        q->first = (q->first + 1) % LOG_LINES;
        q->count--;
    }
    pthread_mutex_unlock(&q->mutex);
    return found;
}

int64_t clock_realtime_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
