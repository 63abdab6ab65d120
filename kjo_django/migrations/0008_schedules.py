import django.utils.timezone
import kjo_django.models
from django.db import migrations, models

import kjo_django.ids


class Migration(migrations.Migration):

    dependencies = [
        ('kjo_django', '0007_priorities'),
    ]

    operations = [
        migrations.CreateModel(
            name='Schedule',
            fields=[
                ('id', models.UUIDField(default=kjo_django.ids.uuid7, editable=False, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=100, unique=True, verbose_name='name')),
                ('job', models.CharField(help_text='The name of the handler.', max_length=100, verbose_name='job')),
                ('payload', models.JSONField(blank=True, default=dict, verbose_name='payload')),
                ('cron', models.CharField(blank=True, default='', help_text='Minute, hour, day of month, month, day of week; or a name such as @daily.', max_length=100, verbose_name='cron expression')),
                ('every', models.PositiveIntegerField(blank=True, help_text='Seconds between two ticks.', null=True, verbose_name='interval')),
                ('at', models.DateTimeField(blank=True, help_text='When a single tick is due.', null=True, verbose_name='moment')),
                ('timezone', models.CharField(blank=True, default='', help_text="Time zone of the cron expression. Empty: the project's.", max_length=64, verbose_name='time zone')),
                ('queue', models.CharField(blank=True, default='', help_text="Empty: the job's own.", max_length=100, verbose_name='queue')),
                ('catch_up', models.CharField(choices=[('none', 'None of them'), ('one', 'The latest'), ('all', 'All of them')], default='one', max_length=4, verbose_name='missed ticks')),
                ('overlap', models.CharField(choices=[('allow', 'Jobs may overlap'), ('skip', 'The tick is skipped')], default='allow', max_length=5, verbose_name='overlap')),
                ('jitter', models.PositiveIntegerField(default=0, help_text='A job starts up to this many seconds after its tick.', verbose_name='jitter')),
                ('expires_after', models.PositiveIntegerField(blank=True, help_text='A job that has not started this many seconds after its tick is not run.', null=True, verbose_name='expires after')),
                ('starts_at', models.DateTimeField(blank=True, null=True, verbose_name='starts at')),
                ('ends_at', models.DateTimeField(blank=True, null=True, verbose_name='ends at')),
                ('source', models.CharField(choices=[('code', 'Code'), ('admin', 'Operators')], default='admin', max_length=5, verbose_name='source')),
                ('is_enabled', models.BooleanField(default=True, help_text='No: the code does not declare it any more.', verbose_name='enabled')),
                ('is_paused', models.BooleanField(default=False, verbose_name='paused')),
                ('declaration', models.JSONField(blank=True, help_text='The columns as the code has them.', null=True, verbose_name='declaration')),
                ('overridden', models.JSONField(blank=True, default=list, help_text='Columns that an operator has changed; the code does not change them back.', verbose_name='overridden')),
                ('next_at', models.DateTimeField(blank=True, help_text='Empty: there is none.', null=True, verbose_name='next tick')),
                ('last_at', models.DateTimeField(blank=True, null=True, verbose_name='last tick')),
                ('last_job_id', models.UUIDField(blank=True, help_text='The job of the last tick that has one.', null=True, verbose_name='last job')),
                ('skipped_count', models.PositiveBigIntegerField(default=0, help_text='Ticks without a job: caught up with, or overlapping.', verbose_name='skipped')),
                ('problem', models.CharField(blank=True, default='', help_text='Why the last due tick could not be stored. It waits.', max_length=500, verbose_name='problem')),
                ('changed_by', models.CharField(blank=True, default='', max_length=150, verbose_name='changed by')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='created at')),
                ('updated_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='updated at')),
            ],
            options={
                'verbose_name': 'schedule',
                'verbose_name_plural': 'schedules',
                'db_table': 'kjo_schedule',
                'ordering': ('name',),
                'permissions': (('pause_schedule', 'Can pause and resume schedules'), ('run_schedule', 'Can run schedules now')),
                'indexes': [kjo_django.models.PartialIndex(condition=models.Q(('is_enabled', True), ('is_paused', False), ('next_at__isnull', False)), fields=['next_at'], name='kjo_schedule_due_idx')],
            },
        ),
    ]
