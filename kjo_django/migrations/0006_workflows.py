

import django.db.models.deletion
import django.utils.timezone
import kjo_django.ids
import kjo_django.models
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('kjo_django', '0005_due_rows_by_queue'),
    ]

    operations = [
        migrations.AlterField(
            model_name='job',
            name='state',
            field=models.CharField(choices=[('waiting', 'Waiting'), ('pending', 'Pending'), ('queued', 'Queued'), ('failing', 'Failing'), ('completed', 'Completed'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='pending', max_length=10, verbose_name='state'),
        ),
        migrations.CreateModel(
            name='Workflow',
            fields=[
                ('id', models.UUIDField(default=kjo_django.ids.uuid7, editable=False, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=100, verbose_name='name')),
                ('unique_id', models.CharField(blank=True, help_text='Given by the caller: one workflow per name and unique id.', max_length=255, null=True, verbose_name='unique id')),
                ('state', models.CharField(choices=[('running', 'Running'), ('held', 'Held'), ('completed', 'Completed'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='running', max_length=10, verbose_name='state')),
                ('reason', models.CharField(blank=True, default='', help_text='Why it failed, was cancelled or is held.', max_length=500, verbose_name='reason')),
                ('on_failure', models.CharField(choices=[('cancel', 'Is cancelled'), ('run', 'Runs all the same'), ('hold', 'Waits until the failed step has completed')], default='cancel', max_length=6, verbose_name='on failure')),
                ('step_count', models.PositiveIntegerField(default=0, verbose_name='steps')),
                ('open_stage_count', models.PositiveIntegerField(default=0, help_text='Stages with a step that has not ended.', verbose_name='open stages')),
                ('deadline', models.DateTimeField(blank=True, help_text='Not ended by then, it fails.', null=True, verbose_name='deadline')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='created at')),
                ('finished_at', models.DateTimeField(blank=True, null=True, verbose_name='finished at')),
            ],
            options={
                'verbose_name': 'workflow',
                'verbose_name_plural': 'workflows',
                'db_table': 'kjo_workflow',
                'ordering': ('-id',),
                'permissions': (('cancel_workflow', 'Can cancel workflows'), ('retry_workflow', 'Can retry workflows from their failed steps')),
                'default_permissions': ('view',),
                'indexes': [models.Index(fields=['state', 'id'], name='kjo_workflow_state_idx'), kjo_django.models.PartialIndex(condition=models.Q(('deadline__isnull', False), ('state__in', ('running', 'held'))), led_by=('state',), fields=['deadline'], name='kjo_workflow_deadline_idx')],
                'constraints': [kjo_django.models.UniqueWhereGiven(fields=('name', 'unique_id'), name='kjo_workflow_unique_id')],
            },
        ),
        migrations.CreateModel(
            name='WorkflowStage',
            fields=[
                ('id', models.UUIDField(default=kjo_django.ids.uuid7, editable=False, primary_key=True, serialize=False)),
                ('handler', models.CharField(max_length=100, verbose_name='handler')),
                ('queue', models.CharField(max_length=100, verbose_name='queue')),
                ('on_failure', models.CharField(choices=[('cancel', 'Is cancelled'), ('run', 'Runs all the same'), ('hold', 'Waits until the failed step has completed')], max_length=6, verbose_name='on failure')),
                ('step_count', models.PositiveIntegerField(verbose_name='steps')),
                ('argument', models.CharField(blank=True, default='', help_text='Is given the result of the one step of the source.', max_length=100, verbose_name='argument')),
                ('finished_at', models.DateTimeField(blank=True, help_text='When its last step ended.', null=True, verbose_name='finished at')),
                ('source', models.ForeignKey(blank=True, db_index=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='kjo_django.workflowstage')),
                ('workflow', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='stages', to='kjo_django.workflow')),
            ],
            options={
                'db_table': 'kjo_workflow_stage',
                'ordering': ('id',),
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='WorkflowEdge',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('is_met', models.BooleanField(default=False)),
                ('required', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='followers', to='kjo_django.workflowstage')),
                ('stage', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='requirements', to='kjo_django.workflowstage')),
            ],
            options={
                'db_table': 'kjo_workflow_edge',
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='WorkflowCount',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('open_count', models.IntegerField(default=0)),
                ('failed_count', models.IntegerField(default=0)),
                ('cancelled_count', models.IntegerField(default=0)),
                ('stage', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='counts', to='kjo_django.workflowstage')),
            ],
            options={
                'db_table': 'kjo_workflow_count',
                'default_permissions': (),
            },
        ),
        migrations.AddField(
            model_name='job',
            name='stage',
            field=models.ForeignKey(blank=True, db_constraint=False, db_index=False, editable=False, help_text="Of a workflow's step.", null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='jobs', to='kjo_django.workflowstage', verbose_name='stage'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=kjo_django.models.PartialIndex(condition=models.Q(('stage__isnull', False)), fields=['stage', 'id'], name='kjo_job_stage_idx'),
        ),
        migrations.AddIndex(
            model_name='workflowedge',
            index=models.Index(fields=['stage', 'is_met'], name='kjo_workflow_edge_idx'),
        ),
        migrations.AddConstraint(
            model_name='workflowedge',
            constraint=models.UniqueConstraint(fields=('required', 'stage'), name='kjo_workflow_edge_key'),
        ),
    ]
